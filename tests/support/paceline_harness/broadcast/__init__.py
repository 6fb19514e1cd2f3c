"""Simulates a broadcast to many workers, with the real tracker making the decisions."""

from paceline_harness.broadcast.rows import rows

__all__ = ["rows"]
