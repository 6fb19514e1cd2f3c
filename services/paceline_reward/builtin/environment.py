"""Kind `environment`: what the environment itself said."""

from __future__ import annotations

from paceline.interfaces import RewardInput


def environment(item: RewardInput) -> float:
    """The sum of the environment's step rewards."""
    return item.environment_reward
