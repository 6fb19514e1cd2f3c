"""Contract tests for replays."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plugins import MAX_GUESTS, Context, FinishedGroup, Guest, Replay, Stored
from paceline.testing.common import expect, expect_type, resolved
from paceline.testing.filters import REWARDS, finished_group

STEPS = 40
Offer = tuple[Sequence[float], Sequence[Stored], Sequence[Guest]]


def fulfils_the_contract(
    plugin: Any,
    options: Mapping[str, Any] | None = None,
    *,
    keeps: Sequence[tuple[Sequence[float], Sequence[int]]] = (),
    offers: Sequence[Offer] = (),
    step: int = STEPS,
) -> None:
    """Check for valid answers on every group and pool, always the same ones.

    `plugin` is called as `make(**options)`. Each of `keeps` has the rewards of a group, and the
    places of what is stored of it; each of `offers` has those rewards, what is stored of the task,
    and the guests at `step`.
    """
    replay: Replay = resolved("replays", plugin)(**(options or {}))
    for rewards in REWARDS:
        group = finished_group(rewards)
        _kept(replay, group)
        for many in (1, 3, 100):
            pool = [Stored(float(n % 2), step=n, answer=str(n), length=n) for n in range(many)]
            _guests(replay, group, pool, STEPS)
    for rewards, places in keeps:
        found = _kept(replay, finished_group(rewards))
        expect(found == [*places], f"stores {found} of the rewards {rewards}, not {[*places]}")
    for rewards, pool, guests in offers:
        joined = _guests(replay, finished_group(rewards), pool, step)
        expect(joined == [*guests], f"{joined} join the rewards {rewards}, not {[*guests]}")


def _kept(replay: Replay, group: FinishedGroup) -> list[int]:
    context = Context(0, STEPS)
    found = [operator.index(place) for place in replay.keep(group, context)]
    expect(found == [*replay.keep(group, context)], f"stores something else of {group} each time")
    size = len(group.rewards)
    valid = found == sorted({*found}) and all(0 <= place < size for place in found)
    expect(valid, f"stores {found} of {size} episodes; ascending places are due")
    return found


def _guests(replay: Replay, group: FinishedGroup, pool: Sequence[Stored], step: int) -> list[Guest]:
    context = Context(step, STEPS)
    found = list(replay.offer(group, pool, context))
    expect(found == list(replay.offer(group, pool, context)), f"{group} has other guests each time")
    for each in found:
        expect_type(each, Guest, "what joins a group")
    leaves = [each.replaces for each in found if each.replaces is not None]
    size = len(group.rewards)
    for places, below in (([each.stored for each in found], len(pool)), (leaves, size)):
        valid = len({*places}) == len(places) and all(0 <= place < below for place in places)
        expect(valid, f"places {places} of {below}; each once, from 0 to {below - 1}")
    expect(len(found) <= MAX_GUESTS, f"{len(found)} guests; at most {MAX_GUESTS}")
    expect(len(leaves) < size, f"nothing stays of a group of {size}")
    return found
