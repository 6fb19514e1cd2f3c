"""Drops groups whose rewards are all equal, since they contribute no gradient."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.plugins import Drop, FinishedGroup, Keep

Names = Annotated[tuple[str, ...], Field(max_length=16)]


def zero_variance(
    group: FinishedGroup, *, tolerance: float = 1e-9, without: Names = ()
) -> Keep | Drop:
    """Drop a group without variance; a single episode is kept.

    Args:
        group: of any size.
        tolerance: rewards as close as this are equal.
        without: parts of the reward whose variance does not count, as a penalty for length in DAPO
            (arXiv 2503.14476, section 3.2). A group is kept if any other part varies.
    """
    if len(group.rewards) < 2:
        return Keep()
    others = [values for name, values in group.parts.items() if name not in without]
    columns = others if without and others else [group.rewards]
    varies = any(max(values) - min(values) > tolerance for values in map(_known, columns))
    return Keep() if varies else Drop("zero_variance")


def _known(values: tuple[float, ...]) -> list[float]:
    """Without those that an episode lacks."""
    return [value for value in values if value == value] or [0.0]
