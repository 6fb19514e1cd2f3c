"""Samplers, allocators and replays of a job's own code: messages, and the calls in its process."""
