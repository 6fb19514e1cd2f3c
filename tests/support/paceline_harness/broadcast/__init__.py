"""Simulation of a broadcast to many workers, with the tracker that decides in earnest."""

from paceline_harness.broadcast.rows import rows

__all__ = ["rows"]
