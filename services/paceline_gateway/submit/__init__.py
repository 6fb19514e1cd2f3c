"""Checks of a job before it is accepted."""
