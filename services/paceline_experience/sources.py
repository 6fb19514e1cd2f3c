"""Builds the task sources of a job and checks the plug-ins that run in this service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline import plugins
from paceline.config import JobSpec
from paceline.config.named import missing
from paceline.errors import InvalidError, PacelineError
from paceline.interfaces import TaskSource

# Kinds of plug-ins that run in this service.
HERE = frozenset({"tasks", "samplers", "filters", "advantages"})


@dataclass(frozen=True, slots=True)
class Sources:
    """Tasks to train on, and to measure with."""

    train: TaskSource
    evals: TaskSource | None


def check_plugins(spec: JobSpec) -> None:
    """Whether all is installed that the ledger will call; imports nothing.

    Raises:
        InvalidError: a task source, sampler, filter or advantage is not.
    """
    if wrong := list(missing(spec, HERE)):
        raise InvalidError("; ".join(wrong))


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
    make = plugins.find("tasks", name)
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
