"""Plug-ins that fail in different ways."""

import sys
from collections.abc import Sequence


def dividing_filter(rewards: Sequence[float]) -> str:
    return str(len(rewards) / 0)


def leaving_filter(rewards: Sequence[float]) -> str:
    sys.exit(len(rewards) + 1)


def choosy_filter(rewards: Sequence[float]) -> str:
    """Fails on groups whose first reward is zero, and keeps the others."""
    return "" if rewards[0] else str(1 / rewards[0])


def raising_advantage(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    del rewards, groups, lengths
    raise KeyError("baseline")


def leaving_advantage(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    del rewards, groups, lengths
    sys.exit(3)


def short_advantage(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    del groups, lengths
    return [0.0] * (len(rewards) - 1)


def endless_advantage(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    del groups, lengths
    return [float("inf")] * len(rewards)
