"""Which plug-ins a job names, and what is wrong with them and their options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline import plugins
from paceline.config.base import Plugin
from paceline.config.job import JobSpec
from paceline.config.options import wrong_options
from paceline.errors import InvalidError


@dataclass(frozen=True, slots=True)
class Named:
    """One plug-in of a job: the field with its name, and the one above its options."""

    kind: str
    name: str
    at: str
    below: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def named(spec: JobSpec) -> Iterator[Named]:
    """Every plug-in of a job; the world of its tasks for each kind and purpose."""
    tasks, experience = spec.tasks, spec.experience
    for kind in ("environments", "tasks"):
        at = "tasks.environment"
        yield Named(kind, tasks.environment, at, "tasks.options", tasks.options)
        if spec.eval is not None:
            both = {**tasks.options, **spec.eval.options}
            yield Named(kind, tasks.environment, at, "eval.options", both)
    for index, part in enumerate(spec.reward):
        yield _named("rewards", f"reward.{index}", part)
    yield _named("samplers", "experience.sampler", experience.sampler)
    for index, each in enumerate(experience.filters):
        yield _named("filters", f"experience.filters.{index}", each)
    yield _named("advantages", "experience.advantage", experience.advantage)
    yield _named("engines", "rollout.engine", spec.rollout.engine)
    yield _named("objectives", "trainer.objective", spec.trainer.objective)
    for index, each in enumerate(spec.tracking):
        yield _named("trackers", f"tracking.{index}", each)


def problems(
    spec: JobSpec, kinds: Collection[str] = plugins.KINDS, *, here: bool = False
) -> Iterator[str]:
    """A line for each plug-in of these kinds that is not installed, and each option it refuses.

    `here`: they run in this process, so they are imported where nothing else tells their options.
    """
    told: set[str] = set()
    for each in named(spec):
        # What is wrong with a world is wrong with it for both of its kinds and purposes.
        if each.kind not in kinds or each.at in told:
            continue
        for line in _problems(each, here=here):
            told.add(each.at)
            yield line


def _problems(each: Named, *, here: bool) -> Iterator[str]:
    try:
        plugins.check(each.kind, each.name)
    except InvalidError as error:
        yield f"{each.at}: {error.message.removeprefix(f'{each.kind}: ')}"
        return
    yield from wrong_options(each.below, each.kind, each.name, each.options, itself=here)


def _named(kind: str, field: str, plugin: Plugin) -> Named:
    return Named(kind, plugin.kind, f"{field}.kind", field, plugin.options)
