"""Drops groups whose rewards are all equal, since they contribute no gradient."""

from __future__ import annotations

from collections.abc import Sequence


def zero_variance(rewards: Sequence[float], *, tolerance: float = 1e-9) -> str:
    """The reason to drop a group, or empty to keep it; a single episode is kept."""
    if len(rewards) < 2 or max(rewards) - min(rewards) > tolerance:
        return ""
    return "zero_variance"
