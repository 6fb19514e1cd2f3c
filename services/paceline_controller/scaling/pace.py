"""When a size follows its target: a dead band, quick increases, slow decreases, bounded steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.config.service import ScalingOptions

_CLEAR = 2.0  # standard errors: in one of twenty cases later figures take a change back


@dataclass(frozen=True, slots=True)
class Pace:
    """What one size did, and since when less would have been enough."""

    changed_s: float = -math.inf
    low_since_s: float = math.inf
    low_most: float = 0.0  # that was wanted since then

    def changed(self, now_s: float) -> Pace:
        """The size is another one from now on."""
        return Pace(changed_s=now_s)


@dataclass(frozen=True, slots=True)
class Step:
    """Where to, and how things stand afterwards."""

    goal: float
    pace: Pace


def follow(
    pace: Pace,
    *,
    size: float,
    target: float,
    doubt: float,
    may_grow: bool,
    may_shrink: bool,
    options: ScalingOptions,
    now_s: float,
) -> Step:
    """The next size on the way to a target; the same size if it is close, or too early.

    `doubt` is the standard error of the target, relative to it: a smaller change waits until
    figures are clearer.

    It shrinks to the largest target of the last `down_s`, all of which were that much lower.
    """
    if target > size * (1 + max(options.band, _CLEAR * doubt)):
        pace = replace(pace, low_since_s=math.inf, low_most=0.0)
        if may_grow and now_s - pace.changed_s >= options.up_s:
            return Step(min(target, max(size * options.most_up, 1.0)), pace)
        return Step(size, pace)
    if target >= size * (1 - max(options.slack, _CLEAR * doubt)) or not may_shrink:
        return Step(size, replace(pace, low_since_s=math.inf, low_most=0.0))
    most, since_s = max(pace.low_most, target), min(pace.low_since_s, now_s)
    pace = replace(pace, low_since_s=since_s, low_most=most)
    if now_s - since_s >= options.down_s:
        return Step(max(most, size * options.most_down), pace)
    return Step(size, pace)
