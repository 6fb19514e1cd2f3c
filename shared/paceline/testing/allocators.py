"""Contract tests for allocators."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.plugins import (
    MAX_NAMED_TASKS,
    MAX_PICK_BYTES,
    MAX_WAVE,
    MAX_WAVES,
    Allocator,
    ClosesEarly,
    Context,
    FinishedEpisode,
    FinishedTurn,
    GroupOutcome,
    Learns,
    OpenGroup,
    Pick,
    Start,
)
from paceline.testing.common import expect, expect_type, resolved

TASKS, STEPS = 5, 3
LENGTH = 6  # policy tokens of an episode, in two turns after three tokens of prompt


def fulfils_the_contract(
    plugin: Any,
    options: Mapping[str, Any] | None = None,
    *,
    group_size: int = 4,
    sizes: Sequence[tuple[Callable[[int, int], float], int]] = (),
) -> None:
    """Play groups of some tasks; check that waves are valid, end, and are the same every time.

    `plugin` is called as `make(group_size=..., **options)`. Each of `sizes` is a function from task
    and index to a reward, and how many episodes task 0 has in all then.
    """
    make = resolved("allocators", plugin)

    def made() -> Allocator:
        allocator: Allocator = make(group_size=group_size, **(options or {}))
        if isinstance(allocator, Learns):
            allocator.remember({})
        return allocator

    for reward in (_never, _always, _mixed):
        allocator, memory = made(), dict[str, Any]()
        for step in range(STEPS):
            context = Context(step, STEPS, 7)
            groups = [_played(allocator, task, reward, context) for task in range(TASKS)]
            if isinstance(allocator, Learns):
                memory = _taught(allocator, groups, replace(context, memory=memory))
    for reward, size in sizes:
        found = len(_played(made(), 0, reward, Context(0, STEPS, 7)).episodes)
        expect(found == size, f"{found} episodes; {size} were expected")


def _never(task: int, index: int) -> float:
    del task, index
    return 0.0


def _always(task: int, index: int) -> float:
    del task, index
    return 1.0


def _mixed(task: int, index: int) -> float:
    return float((task + index) % 3 == 0)


def _played(
    allocator: Allocator, task: int, reward: Callable[[int, int], float], context: Context
) -> OpenGroup:
    """All waves of a group, whose episodes finish one after the other."""
    pick = Pick(task, "variant", {"a": 1})
    first = list(allocator.start(pick, context))
    expect(first == list(allocator.start(pick, context)), "the same pick starts other episodes")
    _check(first, {}, least=1)
    group = OpenGroup(pick, (), num_open=len(first))
    starts = first
    while True:
        for start in starts:
            index = len(group.episodes)
            done = _episode(index, start, reward(task, index))
            episodes = (*group.episodes, done)
            group = replace(group, episodes=episodes, num_open=group.num_open - 1)
            if group.num_open and isinstance(allocator, ClosesEarly) and _enough(allocator, group):
                return group
        starts = list(allocator.more(group, context))
        expect(starts == list(allocator.more(group, context)), "the same group gets other waves")
        _check(starts, {each.index: each for each in group.episodes}, least=0)
        if not starts:
            return group
        expect(group.waves < MAX_WAVES, f"more than {MAX_WAVES} waves")
        group = replace(group, num_open=len(starts), waves=group.waves + 1)


def _enough(allocator: ClosesEarly, group: OpenGroup) -> bool:
    found: Any = allocator.enough(group)
    expect_type(found, bool, "whether a group has enough")
    expect(found == allocator.enough(group), "the same group has enough once, then not")
    return found


def _episode(index: int, start: Start, reward: float) -> FinishedEpisode:
    turns = (FinishedTurn(6, reward), FinishedTurn(9, 0.0, first_error=reward == 0.0))
    return FinishedEpisode(index, start, reward, str(index % 2), LENGTH, turns=turns)


def _check(starts: Sequence[Any], finished: Mapping[int, FinishedEpisode], *, least: int) -> None:
    expect(
        least <= len(starts) <= MAX_WAVE,
        f"a wave of {len(starts)} episodes; {least} to {MAX_WAVE} are allowed",
    )
    for start in starts:
        expect_type(start, Start, "what begins an episode")
        told = json.dumps({"variant": start.variant, "meta": dict(start.meta)}, allow_nan=False)
        expect(len(told) <= MAX_PICK_BYTES, f"a start has more than {MAX_PICK_BYTES} bytes")
        limits = start.limits
        for limit in (limits.max_turns, limits.max_tokens, limits.temperature):
            expect(limit is None or limit > 0, f"a limit of {limit}")
        if start.parent is not None:
            expect(start.parent[0] in finished, f"parent {start.parent[0]} has not finished")
            expect(0 < start.parent[1] <= 3 + LENGTH, f"{start.parent[1]} tokens of a parent")
    named = {task for start in starts for task in start.tasks}
    expect(len(named) <= MAX_NAMED_TASKS, f"more than {MAX_NAMED_TASKS} other tasks")
    expect(all(0 <= task < TASKS for task in named), "a start names tasks that there are not")


def _taught(allocator: Learns, groups: Sequence[OpenGroup], context: Context) -> dict[str, Any]:
    outcomes = [
        GroupOutcome(
            group.pick.task,
            group.rewards,
            tuple(each.answer for each in group.episodes),
            lengths=tuple(each.length for each in group.episodes),
            truncated=(False,) * len(group.episodes),
            kept=(True,) * len(group.episodes),
            variant=group.pick.variant,
            meta=group.pick.meta,
        )
        for group in groups
    ]
    changed = dict(allocator.observe(outcomes, replace(context, outcomes=outcomes)))
    changed = json.loads(json.dumps(changed, allow_nan=False))
    memory = {**context.memory, **changed}
    memory = {key: value for key, value in memory.items() if value is not None}
    allocator.remember(memory)
    return memory
