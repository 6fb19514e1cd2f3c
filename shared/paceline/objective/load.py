"""Finds the slots of a job's objective and binds their options."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.base import PluginSpec
from paceline.config.objective import ObjectiveSpec
from paceline.objective.pipeline import Objective
from paceline.objective.slot import Slot, find_slot


def load_objective(spec: ObjectiveSpec, hooks: Sequence[PluginSpec] = ()) -> Objective:
    """The objective, with the options of its slots validated and bound.

    Raises:
        InvalidError: there is no such plug-in, or it has no such option.
    """
    return Objective(
        proximal=_load("proximals", "objective.proximal", [spec.proximal])[0],
        shaping=_load("shapings", "objective.shaping", spec.shaping),
        corrections=_load("corrections", "objective.corrections", spec.corrections),
        surrogate=_load("surrogates", "objective.surrogate", [spec.surrogate])[0],
        regularisers=_load("regularisers", "objective.regularisers", spec.regularisers),
        aggregation=_load("aggregations", "objective.aggregation", [spec.aggregation])[0],
        hooks=_load("hooks", "hooks", hooks),
    )


def _load(kind: str, field: str, plugins: Sequence[PluginSpec]) -> list[Slot]:
    found: list[Slot] = []
    kinds = [plugin.kind for plugin in plugins]
    for index, plugin in enumerate(plugins):
        before = kinds[:index].count(plugin.kind)
        name = f"{plugin.kind}_{before + 1}" if before else plugin.kind
        found.append(find_slot(kind, f"trainer.{field}", plugin, name=name))
    return found
