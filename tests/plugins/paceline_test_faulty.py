"""Plug-ins that fail in different ways."""

import sys
from collections.abc import Sequence

from paceline.plugins import Context, EpisodeBatch


def dividing_filter(rewards: Sequence[float]) -> str:
    return str(len(rewards) / 0)


def leaving_filter(rewards: Sequence[float]) -> str:
    sys.exit(len(rewards) + 1)


def choosy_filter(rewards: Sequence[float]) -> str:
    """Fails on groups whose first reward is zero, and keeps the others."""
    return "" if rewards[0] else str(1 / rewards[0])


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
