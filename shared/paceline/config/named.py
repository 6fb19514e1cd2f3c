"""Which plug-ins a job names, and which of them are not installed."""

from __future__ import annotations

from collections.abc import Container, Iterator

from paceline import plugins
from paceline.config.job import JobSpec
from paceline.errors import InvalidError


def named(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Field, kind and name of every plug-in of a job."""
    yield "tasks.environment", "environments", spec.tasks.environment
    yield "tasks.environment", "tasks", spec.tasks.environment
    for index, part in enumerate(spec.reward):
        yield f"reward.{index}.kind", "rewards", part.kind
    experience = spec.experience
    yield "experience.sampler.kind", "samplers", experience.sampler.kind
    for index, each in enumerate(experience.filters):
        yield f"experience.filters.{index}.kind", "filters", each.kind
    yield "experience.advantage.kind", "advantages", experience.advantage.kind
    yield "rollout.engine.kind", "engines", spec.rollout.engine.kind
    yield "trainer.objective.kind", "objectives", spec.trainer.objective.kind
    for index, each in enumerate(spec.tracking):
        yield f"tracking.{index}.kind", "trackers", each.kind


def missing(spec: JobSpec, kinds: Container[str] = plugins.KINDS) -> Iterator[str]:
    """A line for each field whose plug-in of these kinds is not installed; nothing is imported."""
    told: set[str] = set()
    for field, kind, name in named(spec):
        if kind not in kinds or field in told:
            continue
        try:
            plugins.check(kind, name)
        except InvalidError as error:
            told.add(field)
            yield f"{field}: {error.message.removeprefix(f'{kind}: ')}"
