"""Drops groups whose episodes all got the same reward: they carry no gradient."""

from __future__ import annotations

from collections.abc import Sequence


def zero_variance(rewards: Sequence[float], *, tolerance: float = 1e-9) -> str:
    """Empty to keep the group, else the reason to drop it; a single episode is kept."""
    if len(rewards) < 2 or max(rewards) - min(rewards) > tolerance:
        return ""
    return "zero_variance"
