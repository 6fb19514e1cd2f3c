"""Finds the slots of a job's objective and binds their options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from paceline.config.base import PluginSpec
from paceline.config.objective import ObjectiveSpec
from paceline.methods.objective.pipeline import Objective
from paceline.methods.objective.slot import Slot, find_slot
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets


def load_objective(
    spec: ObjectiveSpec,
    hooks: Sequence[PluginSpec] = (),
    *,
    allowed: AllowedTargets = NO_TARGETS,
) -> Objective:
    """The objective, with the options of its slots validated and bound.

    Raises:
        InvalidError: there is no such plug-in, or it has no such option.
        UnlistedError: a slot is a function of a module that is not `allowed`.
    """
    load = partial(_load, Counter[str](), allowed)
    return Objective(
        proximal=load("proximals", "objective.proximal", [spec.proximal])[0],
        shaping=load("shapings", "objective.shaping", spec.shaping),
        corrections=load("corrections", "objective.corrections", spec.corrections),
        surrogate=load("surrogates", "objective.surrogate", [spec.surrogate])[0],
        regularisers=load("regularisers", "objective.regularisers", spec.regularisers),
        aggregation=load("aggregations", "objective.aggregation", [spec.aggregation])[0],
        hooks=load("hooks", "hooks", hooks),
    )


def _load(
    seen: Counter[str],
    allowed: AllowedTargets,
    kind: str,
    field: str,
    plugins: Sequence[PluginSpec],
) -> list[Slot]:
    """Slots under names of their own: plans and metrics are by name, whatever the kind."""
    slots: list[Slot] = []
    for plugin in plugins:
        seen[plugin.kind] += 1
        number = seen[plugin.kind]
        name = plugin.kind if number == 1 else f"{plugin.kind}_{number}"
        slots.append(find_slot(kind, f"trainer.{field}", plugin, name=name, allowed=allowed))
    return slots
