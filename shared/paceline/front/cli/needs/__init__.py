"""Estimates the memory and GPUs that a job needs of this machine, before it starts."""
