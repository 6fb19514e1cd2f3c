"""Keeps groups of medium difficulty, as AReaL does (arXiv 2505.24298, section 5.6)."""

from __future__ import annotations

from paceline.plugins import Drop, FinishedGroup, Keep


def mean_reward(group: FinishedGroup, *, low: float = 0.05, high: float = 0.95) -> Keep | Drop:
    """Keep a group whose mean reward is from `low` to `high`."""
    mean = sum(group.rewards) / len(group.rewards)
    if mean < low:
        return Drop("too_hard")
    return Drop("too_easy") if mean > high else Keep()
