"""Plug-ins that fail in different ways."""

import sys
from typing import Any

from paceline.plugins import Context, EpisodeBatch, FinishedGroup, Keep


def dividing_filter(group: FinishedGroup) -> Keep:
    return Keep([len(group.rewards) // 0])


def leaving_filter(group: FinishedGroup) -> Keep:
    sys.exit(len(group.rewards) + 1)


def choosy_filter(group: FinishedGroup) -> Keep:
    """Fails on groups whose first reward is zero, and keeps the others."""
    return Keep() if group.rewards[0] else Keep([int(1 / group.rewards[0])])


def answering_filter(group: FinishedGroup, *, indices: Any = None, mask: bool = False) -> Any:
    """Keeps these indices; or the rewards above zero, as a mask; or answers with a word."""
    if mask:
        return Keep([reward > 0 for reward in group.rewards])
    return "solved" if indices is None else Keep(indices)


def raising_advantage(batch: EpisodeBatch, context: Context) -> list[float]:
    del batch, context
    raise KeyError("baseline")


def leaving_advantage(batch: EpisodeBatch, context: Context) -> list[float]:
    del batch, context
    sys.exit(3)


def short_advantage(batch: EpisodeBatch, context: Context) -> list[float]:
    del context
    return [0.0] * (len(batch.rewards) - 1)


def endless_advantage(batch: EpisodeBatch, context: Context) -> list[float]:
    del context
    return [float("inf")] * len(batch.rewards)
