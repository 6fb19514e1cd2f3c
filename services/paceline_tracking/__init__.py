"""Tracking: hands the history of jobs to experiment trackers, each in a process of its own.

Decisions: docs/decisions/monitoring.md.
"""
