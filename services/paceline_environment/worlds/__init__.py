"""Worlds of environments that came with a job: in sealed processes, several episodes in each."""
