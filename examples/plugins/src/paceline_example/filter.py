"""A filter: whether a finished group is worth training on."""

from __future__ import annotations

from collections.abc import Sequence


def solved(rewards: Sequence[float], *, at_least: float = 1.0) -> str:
    """Drop groups whose task the policy has solved: no reward is below `at_least`."""
    return "solved" if min(rewards) >= at_least else ""
