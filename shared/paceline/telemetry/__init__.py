"""Logs, metrics, usage, traces, and monitoring rules."""
