"""Checks and builds the plug-ins of a job that run in this service: task sources above all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.config import JobSpec
from paceline.config.named import NamedPlugin, named, own_ledger_parts, problems
from paceline.data import JobData, takes_data
from paceline.errors import InvalidError
from paceline.plugins import (
    Advantages,
    Context,
    EpisodeBatch,
    TaskSource,
    registry,
)
from paceline.types import Task
from paceline_experience.ledger.advantages.episodes import trial_batch
from paceline_experience.ledger.advantages.estimate import estimate, parts_of
from paceline_experience.ledger.filters.chain import answered, trial_group
from paceline_experience.ledger.generation.golds import check_golds
from paceline_experience.ledger.generation.memory import Memory
from paceline_experience.ledger.generation.parts import (
    TRIED_TASKS,
    check_fills_a_batch,
    plugin_errors,
    try_installed,
)
from paceline_experience.ledger.generation.plan import (
    WantedTasks,
    generation_plan,
    wanted_tasks,
)
from paceline_experience.ledger.own.parts import NoParts
from paceline_experience.ledger.replay.asked import (
    InstalledReplay,
    make_replay,
    own_replay,
    try_replay,
)

# Kinds of plug-ins that run in this service; of environments only their tasks.
LEDGER_PLUGINS = frozenset(
    {"environments", "samplers", "allocators", "replays", "filters", "advantages"}
)


@dataclass(frozen=True, slots=True)
class Sources:
    """Tasks for training, and for evals by name."""

    train: TaskSource
    evals: Mapping[str, TaskSource] = field(default_factory=dict[str, TaskSource])

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the files that they are from, by name; none of those that say none."""
        found = dict[str, str]()
        for each in (self.train, *self.evals.values()):
            found |= getattr(each, "digests", {})
        return found


class NoTasks:
    """The tasks of a job that is over: its ledger is only read."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, position: int, /) -> Task:
        raise IndexError(f"task {position} of a job that is over")


class _Zeros(NoParts):
    """Stands for advantages of the job's own code, which this process does not import."""

    async def advantages(
        self,
        plugin: NamedPlugin,
        batch: EpisodeBatch,
        context: Context,
        memory: Mapping[str, str],
    ) -> Advantages:
        """One number per episode."""
        del plugin, context, memory
        return Advantages(np.zeros(len(batch.rewards)))


def check_plugins(spec: JobSpec) -> None:
    """Check that the plug-ins of the ledger are installed and accept their options.

    Raises:
        InvalidError: names each task source, sampler, filter or advantage with a problem.
    """
    if wrong := list(problems(spec, LEDGER_PLUGINS, in_process=True)):
        raise InvalidError("; ".join(wrong))


def try_plugins(spec: JobSpec, data: JobData) -> None:
    """Build all plug-ins of the ledger but those of the job's own code, and call each once.

    `data`: what its tasks may read.

    Raises:
        InvalidError: one refuses its options or returns something of a wrong type, or a reward
            cannot read the answer of a task.
        UnavailableError: what a task source reads is away.
    """
    check_plugins(spec)
    wanted, plan = wanted_tasks(spec), generation_plan(spec, own_ledger_parts(spec))
    sources = None if spec.lists_own_tasks else task_sources(wanted, data)
    position = try_installed(plan, len(sources.train) if sources else TRIED_TASKS)
    if sources is not None:
        check_fills_a_batch(plan, len(sources.train))
        fields = [each.options_field for each in wanted]
        tried = dict(zip(fields, (sources.train, *sources.evals.values()), strict=True))
        for number, (field, tasks) in enumerate(tried.items()):
            _try_task(tasks, 0 if number else position, spec, field=field)
        check_golds(spec.reward, tried, world=spec.tasks.environment)
    parts = [part.part for part in spec.reward]
    for each in named(spec):
        if each.kind == "filters" and not each.is_own:
            with plugin_errors(each.options_field, each.name):
                answered(registry.find("filters", each.name), trial_group(parts), each.options)
    _try_replay(spec, parts)
    _try_advantages(spec, parts)


def task_sources(wanted: Sequence[WantedTasks], data: JobData) -> Sources:
    """The task sources of a job; imports plug-ins, which may be slow.

    `data`: what they may read.

    Raises:
        InvalidError: a source is not installed, refuses its options or has no tasks.
        UnavailableError: what it reads is away.
    """
    training, *of_evals = wanted
    train = _build(training, data)
    return Sources(train, {each.evaluation or "": _build(each, data) for each in of_evals})


def _build(wanted: WantedTasks, data: JobData) -> TaskSource:
    name, field, options = wanted.environment, wanted.options_field, wanted.options
    make = registry.environment(name).load_tasks()
    with plugin_errors(field, name):
        takes = takes_data(make)
        given = {takes: replace(data, options_field=field)} if takes else {}
        source = make(seed=wanted.seed, **given, **options)
        empty = len(source) == 0
    if empty:
        where = field.removesuffix(".options")
        raise InvalidError(f"{where}: {name} with options {dict(options)} has no tasks")
    return source


def _try_task(source: TaskSource, position: int, spec: JobSpec, *, field: str) -> None:
    with plugin_errors(field, spec.tasks.environment):
        _expect(source[position], Task, "a Task")


def _try_replay(spec: JobSpec, parts: Sequence[str]) -> None:
    """Offer one stored success to a group, and store what is wanted of it."""
    found = spec.experience.replay
    if found is None or own_replay(spec) is not None:
        return
    with plugin_errors("experience.replay", found.kind):
        replay = InstalledReplay(make_replay(found.kind, found.options), kind=found.kind)
        context = Context(0, spec.stop.steps, spec.tasks.seed)
        asyncio.run(try_replay(replay, trial_group(parts), context))


def _try_advantages(spec: JobSpec, parts: Sequence[str]) -> None:
    found, context = parts_of(spec, _Zeros()), Context(0, spec.stop.steps, spec.tasks.seed)
    asyncio.run(estimate(found, trial_batch(parts), context, Memory()))


def _expect(value: Any, kind: type, needed: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"an answer of type {type(value).__name__}; {needed} is needed")
