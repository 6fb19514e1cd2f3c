"""Damps changes of a size: a dead band, quick increases, slow decreases, bounded steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.config.sections.scaling import ScalingOptions

_CLEAR = 2.0  # standard errors: one change in twenty is reverted by later data


@dataclass(frozen=True, slots=True)
class SizeHistory:
    """When a size last changed, and since when less would have been enough."""

    changed_s: float = -math.inf
    low_since_s: float = math.inf
    low_max: float = 0.0  # largest target since then

    def changed(self, now_s: float) -> SizeHistory:
        """The history after a change of the size at `now_s`."""
        return SizeHistory(changed_s=now_s)


@dataclass(frozen=True, slots=True)
class SizeDecision:
    """The next size, and the history after it."""

    goal: float
    pace: SizeHistory


def follow(
    pace: SizeHistory,
    *,
    size: float,
    target: float,
    doubt: float,
    may_grow: bool,
    may_shrink: bool,
    options: ScalingOptions,
    now_s: float,
) -> SizeDecision:
    """The next size on the way to a target; the same size if it is close, or too early.

    `doubt` is the relative standard error of the target; changes smaller than twice that are
    deferred.

    It shrinks only after all targets of `scale_down_stabilization_s` were low enough, and to the
    largest of them.
    """
    if target > size * (1 + max(options.scale_up_tolerance, _CLEAR * doubt)):
        pace = replace(pace, low_since_s=math.inf, low_max=0.0)
        if may_grow and now_s - pace.changed_s >= options.scale_up_cooldown_s:
            return SizeDecision(min(target, max(size * options.max_scale_up, 1.0)), pace)
        return SizeDecision(size, pace)
    if target >= size * (1 - max(options.scale_down_tolerance, _CLEAR * doubt)) or not may_shrink:
        return SizeDecision(size, replace(pace, low_since_s=math.inf, low_max=0.0))
    highest, since_s = max(pace.low_max, target), min(pace.low_since_s, now_s)
    pace = replace(pace, low_since_s=since_s, low_max=highest)
    if now_s - since_s >= options.scale_down_stabilization_s:
        return SizeDecision(max(highest, size * options.max_scale_down), pace)
    return SizeDecision(size, pace)
