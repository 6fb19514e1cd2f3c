"""Builds the task sources of a job and checks the plug-ins that run in this service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline import plugins
from paceline.config import JobSpec
from paceline.errors import InvalidError, PacelineError
from paceline.interfaces import TaskSource


@dataclass(frozen=True, slots=True)
class Sources:
    """Tasks to train on, and to measure with."""

    train: TaskSource
    evals: TaskSource | None


def check_plugins(spec: JobSpec) -> None:
    """Import what the ledger will call.

    Raises:
        InvalidError: a sampler, filter or advantage is not installed.
    """
    experience = spec.experience
    plugins.find("samplers", experience.sampler.kind)
    for each in experience.filters:
        plugins.find("filters", each.kind)
    if experience.advantage.site == "experience":
        plugins.find("advantages", experience.advantage.kind)


def task_sources(spec: JobSpec) -> Sources:
    """The task sources of a job; imports plug-ins, so it may take a while.

    Raises:
        InvalidError: a source is not installed, refuses its options or has no tasks.
    """
    name, options = spec.tasks.environment, spec.tasks.options
    train = _build(name, options, seed=spec.tasks.seed, where="tasks")
    if spec.eval is None:
        return Sources(train, None)
    overlaid = {**options, **spec.eval.options}
    return Sources(train, _build(name, overlaid, seed=spec.eval.seed, where="eval"))


def _build(name: str, options: Mapping[str, Any], *, seed: int, where: str) -> TaskSource:
    found = plugins.find("tasks", name)
    # A `module:attribute` names the environment, which carries its own tasks.
    make = getattr(found, "tasks", found)
    try:
        source: TaskSource = make(seed=seed, **options)
        empty = len(source) == 0
    except PacelineError:
        raise
    except (TypeError, ValueError, LookupError, OSError, ImportError) as error:
        raise InvalidError(f"{where}.options: {name} refuses them: {error}") from None
    if empty:
        raise InvalidError(f"{where}: {name} with options {dict(options)} has no tasks")
    return source
