"""Reward `environment`: the rewards of the environment's own steps."""

from __future__ import annotations

from paceline.plugins import RewardInput, declares


@declares(inline=True)
def environment(item: RewardInput) -> float:
    """The sum of the environment's step rewards."""
    return item.environment_reward
