"""Reconciles wanted jobs with running processes or pods.

Decisions: docs/decisions/cluster.md.
"""
