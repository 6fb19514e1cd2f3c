"""Contract tests for filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plugins import GroupFilter
from paceline.testing.common import expect, expect_type, resolved

GROUPS: tuple[tuple[float, ...], ...] = (
    (0.0,),
    (1.0, 1.0),
    (0.0, 1.0, 0.5),
    (-1e9, 1e9),
    (0.25,) * 512,
)
MAX_REASON = 64


def fulfils_the_contract(
    plugin: str | GroupFilter,
    options: Mapping[str, Any] | None = None,
    *,
    keeps: Sequence[Sequence[float]] = (),
    drops: Sequence[Sequence[float]] = (),
) -> None:
    """Check that every group gets a short reason or an empty text, always the same one."""
    judge: GroupFilter = resolved("filters", plugin)
    given = dict(options or {})
    for group in (*GROUPS, *keeps, *drops):
        rewards = tuple(group)
        reason = judge(rewards, **given)
        expect_type(reason, str, f"the reason for {rewards}")
        expect(len(reason) <= MAX_REASON, f"the reason is too long for a metric label: {reason!r}")
        expect(
            reason == judge(rewards, **given),
            f"the reason for {rewards} is {reason!r} once, then another",
        )
    for group in keeps:
        expect(not judge(tuple(group), **given), f"drops {tuple(group)}")
    for group in drops:
        expect(judge(tuple(group), **given), f"keeps {tuple(group)}")
