"""Contract tests for filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plugins import Drop, Filter, FinishedGroup, Keep, Repair
from paceline.testing.common import expect, expect_type, resolved

REWARDS: tuple[tuple[float, ...], ...] = (
    (0.0,),
    (1.0, 1.0),
    (0.0, 1.0, 0.5),
    (-1e9, 1e9),
    (0.25,) * 512,
    (0.0,) * 63 + (1.0,),
)
MAX_REASON = 64
Given = FinishedGroup | Sequence[float]


def finished_group(
    rewards: Sequence[float],
    *,
    task: int = 0,
    answers: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    parts: Mapping[str, Sequence[float]] | None = None,
) -> FinishedGroup:
    """A group of episodes with these rewards; by default each has one policy token."""
    count = len(rewards)
    return FinishedGroup(
        task=task,
        rewards=tuple(rewards),
        answers=tuple(answers or [""] * count),
        lengths=tuple(lengths or [1] * count),
        truncated=tuple(truncated or [False] * count),
        parts={name: tuple(values) for name, values in (parts or {}).items()},
    )


def fulfils_the_contract(
    plugin: str | Filter,
    options: Mapping[str, Any] | None = None,
    *,
    keeps: Sequence[Given] = (),
    drops: Sequence[Given] = (),
    picks: Sequence[tuple[Given, Sequence[int]]] = (),
) -> None:
    """Check for one valid decision on every group, always the same one.

    `keeps` and `drops` are groups, or their rewards, that are kept with all their episodes or
    dropped; `picks` says in addition which episodes are kept.
    """
    judge: Filter = resolved("filters", plugin)
    given = dict(options or {})
    for rewards in REWARDS:
        plain = finished_group(rewards)
        _kept(judge, plain, given)
        _kept(judge, _varied(plain), given)
    expected = [
        *((group, range(len(_group(group).rewards))) for group in keeps),
        *((group, ()) for group in drops),
        *picks,
    ]
    for each, indices in expected:
        group = _group(each)
        found = _kept(judge, group, given)
        expect(
            found == tuple(indices), f"keeps the episodes {found} of {group}, not {tuple(indices)}"
        )


def _group(given: Given) -> FinishedGroup:
    return given if isinstance(given, FinishedGroup) else finished_group(given)


def _varied(group: FinishedGroup) -> FinishedGroup:
    """The same rewards with parts, and episodes of every length, of which every third is cut off.

    Half of the episodes lack a part.
    """
    count = len(group.rewards)
    missing = tuple(float(i) if i % 2 else float("nan") for i in range(count))
    return finished_group(
        group.rewards,
        task=1_000_000,
        answers=[str(i % 3) for i in range(count)],
        lengths=list(range(count)),
        truncated=[i % 3 == 0 for i in range(count)],
        parts={"first": group.rewards, "second": missing},
    )


def _kept(judge: Filter, group: FinishedGroup, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the episodes that are kept; none if the group is dropped."""
    found = _decision(judge, group, options)
    again = _decision(judge, group, options)
    expect(found == again, f"the decision on {group} is {found} once, then {again}")
    return found


def _decision(judge: Filter, group: FinishedGroup, options: Mapping[str, Any]) -> tuple[int, ...]:
    answer: Any = judge(group, **options)
    if isinstance(answer, Drop):
        reason: Any = answer.reason
        expect_type(reason, str, f"the reason to drop {group}")
        expect(
            0 < len(reason) <= MAX_REASON, f"a reason of 1 to {MAX_REASON} characters: {reason!r}"
        )
        return ()
    expect(
        isinstance(answer, Keep | Repair),
        f"the decision on {group} is {answer!r}; expected Keep or Drop",
    )
    try:
        chosen = answer.of(len(group.rewards))
        if isinstance(answer, Repair):  # what is kept if nothing can be generated again
            return tuple(i for i in range(len(group.rewards)) if i not in chosen)
        return chosen
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the decision on {group}: {error}") from None
