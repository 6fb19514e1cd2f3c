"""Requirements that plug-ins may declare, and whether a job meets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.job import JobSpec

GROUP = "group>=2"
MOVING_RATIO = "ratio"
TRANSFORM = "transform"
BY_TRAINER = frozenset({"entropy", "reference", "snapshots", "weight_average", "whole_batch"})
"""Needs that every trainer computes for the slots that declare them."""
BY_LEDGER = frozenset({"memory", "tokens", "turns"})
"""Needs that advantages get on request (`paceline.plugins.EpisodeBatch` and `Context`)."""


@dataclass(frozen=True, slots=True)
class Need:
    """A requirement, and the refusal of a job that does not meet it."""

    met: Callable[[JobSpec], bool]
    reason: Callable[[JobSpec, str], str]  # takes the job, and the plug-in as messages name it
    field: str = ""  # field to change; empty: the plug-in's own


NEEDS = {
    MOVING_RATIO: Need(
        met=lambda spec: (
            spec.trainer.objective.proximal.kind != "batch"
            or spec.trainer.mini_batches > 1
            or bool(spec.trainer.objective.inert)
        ),
        reason=lambda _, plugin: (
            f"'batch' with {plugin} and trainer.mini_batches 1: the ratio is always 1, so nothing "
            "is clipped; allowed: another proximal policy such as 'behaviour', more mini-batches, "
            "or trainer.objective.inert: true"
        ),
        field="trainer.objective.proximal",
    ),
    GROUP: Need(
        met=lambda spec: spec.experience.group_size >= 2,
        reason=lambda spec, plugin: (
            f"{spec.experience.group_size} with {plugin}, "
            "which compares the episodes of a group; at least 2 is needed"
        ),
        field="experience.group_size",
    ),
    TRANSFORM: Need(
        met=lambda spec: spec.tasks.transform is not None,
        reason=lambda _, plugin: f"null with {plugin}, which reads what a transform says",
        field="tasks.transform",
    ),
}


def refusal(need: str, spec: JobSpec, *, field: str, plugin: str) -> str:
    """Why a job does not meet a need of the plug-in at a field; empty if it does."""
    if need in BY_TRAINER | BY_LEDGER:
        return ""
    known = NEEDS.get(need)
    if known is None:
        names = ", ".join(sorted(NEEDS.keys() | BY_TRAINER | BY_LEDGER))
        return f"{field}: {plugin} needs {need!r}, which is unknown; known: {names}"
    return "" if known.met(spec) else f"{known.field or field}: {known.reason(spec, plugin)}"
