"""Held-out evaluation: runs of pinned episodes, and what their samples come to.

Decisions: docs/decisions/evaluation.md.
"""
