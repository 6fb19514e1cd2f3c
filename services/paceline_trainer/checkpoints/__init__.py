"""Checkpoints: atomic, verified by digests, on disks and object stores.

Decisions: docs/decisions/models-and-checkpoints.md.
"""
