"""Pauses of a job, and conditions on its metrics that end it."""
