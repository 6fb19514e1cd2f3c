"""What a job's spec says of its tasks, and of how groups of them begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config import JobSpec
from paceline.config.base import PluginSpec
from paceline.config.named import NamedPlugin
from paceline.plugins import Context


@dataclass(frozen=True, slots=True)
class WantedTasks:
    """The tasks of a job for training, or for one evaluation, and the fields that ask for them."""

    environment: str  # that lists them: an installed one, or a class of the job's code
    seed: int
    options: Mapping[str, Any]
    field: str
    options_field: str
    evaluation: str | None = None  # None: for training


def wanted_tasks(spec: JobSpec) -> tuple[WantedTasks, ...]:
    """The tasks of a job, first those for training."""
    tasks, source = spec.tasks, spec.tasks.source
    environment, options = tasks.environment, tasks.options
    if source is not None:
        environment, options = source.kind, source.options
    field = "tasks.options" if source is None else "tasks.source"
    wanted = [WantedTasks(environment, tasks.seed, options, "tasks", field)]
    for name, each in spec.eval_sets.items():
        asks = f"evals.{name}" if name else "eval"
        own, field = (each.options, "options") if source is None else (each.source, "source")
        overlaid = {**options, **own}
        wanted.append(
            WantedTasks(environment, each.seed, overlaid, asks, f"{asks}.{field}", evaluation=name)
        )
    return tuple(wanted)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """How a job draws tasks and begins groups."""

    sampler: PluginSpec
    allocator: PluginSpec | None
    own_sampler: NamedPlugin | None  # the sampler, if it is in the code of the job
    own_allocator: NamedPlugin | None
    group_size: int
    batch_groups: int
    seed: int
    epochs: int | None
    total_steps: int

    @property
    def context(self) -> Context:
        """The context at step 0."""
        return Context(0, self.total_steps, self.seed)


def generation_plan(spec: JobSpec, own: Iterable[NamedPlugin]) -> GenerationPlan:
    """The plan of a job; `own`: plug-ins of the ledger in its code."""
    experience, of_kind = spec.experience, {each.kind: each for each in own}
    return GenerationPlan(
        sampler=experience.sampler,
        allocator=experience.allocator,
        own_sampler=of_kind.get("samplers"),
        own_allocator=of_kind.get("allocators"),
        group_size=experience.group_size,
        batch_groups=experience.batch_groups,
        seed=spec.tasks.seed,
        epochs=spec.tasks.epochs,
        total_steps=spec.stop.steps,
    )
