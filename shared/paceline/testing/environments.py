"""Contract tests for environments: tasks, world, and that neither imports the other."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from paceline.plugins import (
    Environment,
    EnvironmentPlugin,
    FindsTasks,
    Observation,
    StepResult,
    TaskSource,
)
from paceline.testing.common import expect, expect_type, is_number, resolved
from paceline.types import Task

MAX_TURNS = 64
SOME = 16  # tasks that are checked
IMPORT_S = 120.0
Answer = Callable[[Task], str]
Played = list[tuple[Observation, float, bool, bool]]
_ALONE = "import importlib, sys; importlib.import_module({0!r}); sys.exit({1!r} in sys.modules)"


def fulfils_the_contract(
    plugin: str | EnvironmentPlugin,
    options: Mapping[str, Any] | None = None,
    *,
    answer: Answer = lambda _: "",
    reward: float | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Check that tasks are reproducible and that the world plays them to the end.

    `answer` returns the policy's turn for a task; `reward` is the resulting total reward of the
    episode, None if it does not matter; `settings` are an operator's, if the world has any.
    """
    found = resolved("environments", plugin)
    expect(isinstance(found, EnvironmentPlugin), f"{found!r} is not an EnvironmentPlugin")
    descriptor = cast(EnvironmentPlugin, found)
    given = dict(options or {})
    tasks_keep_their_order(descriptor.load_tasks(), given)
    needs_no_world(descriptor)
    source = descriptor.load_tasks()(seed=0, **given)
    make = descriptor.load_world()
    if descriptor.settings:
        make = partial(make, settings=settings or {})
    asyncio.run(plays(make, source[0], given, answer=answer, reward=reward))


def tasks_keep_their_order(
    make: Callable[..., TaskSource], options: Mapping[str, Any] | None = None
) -> None:
    """Check that a task depends only on options, seed and position, with a matching id."""
    given = dict(options or {})
    first, again = make(seed=7, **given), make(seed=7, **given)
    size = len(first)
    expect(size > 0, "a source with these options has no tasks")
    expect(len(again) == size, "the same options and seed yield a different number of tasks")
    for place in {*range(min(SOME, size)), size - 1}:
        task = first[place]
        expect_type(task, Task, f"task {place}")
        expect(task == again[place], f"task {place} differs for the same options and seed")
        expect(task == first[place], f"task {place} differs on a second access")
        if isinstance(first, FindsTasks):
            found = first.position_of(task.task_id)
            here = found is not None and 0 <= found < size and first[found] == task
            expect(here, f"position_of finds task {place} at {found!r}")
    try:
        beyond = first[size]
    except IndexError:
        return
    raise AssertionError(f"position {size} of {size} tasks is {beyond!r}; expected IndexError")


def needs_no_world(plugin: EnvironmentPlugin) -> None:
    """Check that tasks do not import the world, whose dependencies their service lacks."""
    tasks, world = (target.partition(":")[0] for target in (plugin.tasks, plugin.world))
    if tasks == world:
        return
    command = [sys.executable, "-c", _ALONE.format(tasks, world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S)
    expect(
        not done.returncode, f"{tasks} imports {world}, or cannot be imported alone: {done.stderr}"
    )


async def plays(
    make: Callable[..., Environment],
    task: Task,
    options: Mapping[str, Any] | None = None,
    *,
    answer: Answer = lambda _: "",
    reward: float | None = None,
) -> None:
    """Check that the world plays an episode, and a replayable one plays it the same way again."""
    world = make(**(options or {}))
    replayable = getattr(world, "replayable", None)
    expect(isinstance(replayable, bool), f"replayable is {replayable!r}; expected True or False")
    first = await _episode(world, task, answer(task))
    total = sum(worth for _, worth, _, _ in first)
    expect(reward in {None, total}, f"the episode is worth {total}, not {reward}")
    second = await _episode(make(**(options or {})), task, answer(task))
    if replayable:
        expect(
            first == second,
            "it claims to be replayable, but the same seed and actions lead to another state",
        )


async def _episode(world: Environment, task: Task, action: str) -> Played:
    try:
        shown = await world.reset(task, 3)
        expect_type(shown, Observation, "the result of reset")
        expect(shown.messages or shown.text, "the first observation is empty")
        played: Played = [(shown, 0.0, False, False)]
        while not (played[-1][2] or played[-1][3]):
            expect(len(played) <= MAX_TURNS, f"the episode does not end within {MAX_TURNS} turns")
            played.append(_checked(await world.step(action)))
        return played
    finally:
        await world.close()


def _checked(result: StepResult) -> tuple[Observation, float, bool, bool]:
    expect_type(result, StepResult, "the result of step")
    expect(
        is_number(result.reward),
        f"the reward of a step is {result.reward!r}; expected a finite number",
    )
    return result.observation, float(result.reward), result.done, result.truncated
