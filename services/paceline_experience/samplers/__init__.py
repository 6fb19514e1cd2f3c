"""Samplers: the order of tasks."""
