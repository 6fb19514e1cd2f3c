"""Logs, metrics, usage, traces, and monitoring rules.

Decisions: docs/decisions/monitoring.md.
"""
