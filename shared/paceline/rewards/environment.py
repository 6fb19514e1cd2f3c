"""Reward `environment`: the rewards of the environment's own steps."""

from __future__ import annotations

from paceline.plugins import RewardInput, declares
from paceline.rewards.answers import whole
from paceline.types import Task

_ROWS = "dataset"  # its world compares with the answer of a row


def _check_gold(task: Task, *, world: str) -> None:
    if world == task.environment == _ROWS:
        whole(task, "answer")


@declares(inline=True, row_golds=_check_gold)
def environment(item: RewardInput) -> float:
    """The sum of the environment's step rewards."""
    return item.environment_reward
