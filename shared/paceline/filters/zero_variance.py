"""Drops groups whose rewards are all equal, since they contribute no gradient."""

from __future__ import annotations

from paceline.plugins import Drop, FinishedGroup, Keep


def zero_variance(group: FinishedGroup, *, tolerance: float = 1e-9) -> Keep | Drop:
    """Drop a group without variance; a single episode is kept."""
    rewards = group.rewards
    if len(rewards) < 2 or max(rewards) - min(rewards) > tolerance:
        return Keep()
    return Drop("zero_variance")
