"""Simulation of a broadcast to many workers, with the tracker that decides in earnest."""

from paceline.testing.broadcast.rows import rows

__all__ = ["rows"]
