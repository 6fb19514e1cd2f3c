"""Every part of the installed methods, and where a job names it.

Options are those of the first recipe that has the part. So a new method with a recipe is found
without a change here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config import resolve_job
from paceline.config.named import named
from paceline.plugins import registry

KINDS = ("filters", "advantages", *registry.SLOTS)
FIELDS = {
    "filters": "experience.filters",
    "advantages": "experience.advantage",
    "proximals": "trainer.objective.proximal",
    "shapings": "trainer.objective.shaping",
    "corrections": "trainer.objective.corrections",
    "surrogates": "trainer.objective.surrogate",
    "regularisers": "trainer.objective.regularisers",
    "aggregations": "trainer.objective.aggregation",
    "hooks": "trainer.hooks",
}
FOLLOWING = "experience.advantage_shaping"
LISTS = frozenset(
    FIELDS[kind] for kind in ("filters", "shapings", "corrections", "regularisers", "hooks")
) | {FOLLOWING}
# Advantages that change those of another, and that no recipe has.
FOLLOWERS = frozenset({"dart_trim"})
# Of parts that no recipe has, and of those whose recipe is meant for larger groups.
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("shapings", "kl_penalty"): {"coef": 0.01},
    ("advantages", "dart_trim"): {"keep": 2},
    ("filters", "balanced"): {"keep": 3},
    # Answers of the small model are often all the same, which has no weight otherwise.
    ("advantages", "puzzlecraft"): {"exponent": 0.0},
    # Every episode is a demonstration.
    ("advantages", "supervised"): {"success": -1000.0},
}
_JOB: dict[str, Any] = {
    "name": "parts",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
}


@dataclass(frozen=True, slots=True)
class Part:
    """An installed part, and the field of a job that may name it."""

    kind: str
    name: str
    field: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}"


def built_in(kind: str) -> list[str]:
    """Names of the plug-ins of a kind that Paceline itself installs, in order."""
    return sorted(registry.built_in(kind))


def parts() -> list[Part]:
    """All built-in parts, by kind and name."""
    known = {(part.kind, part.name): part for part in _of_recipes()}
    found: list[Part] = []
    for kind in KINDS:
        for name in built_in(kind):
            field = FOLLOWING if name in FOLLOWERS else FIELDS[kind]
            part = known.get((kind, name), Part(kind, name, field))
            options = OPTIONS.get((kind, name), part.options)
            found.append(Part(kind, name, part.field, options))
    return found


def placed(job: Mapping[str, Any], *chosen: Part) -> dict[str, Any]:
    """A copy of a job file with these parts in it."""
    made: dict[str, Any] = copy.deepcopy(dict(job))
    for part in chosen:
        *parents, last = part.field.split(".")
        section = made
        for key in parents:
            section = section.setdefault(key, {})
        entry = {"kind": part.name, **part.options}
        if part.field in LISTS:
            section[last] = [*section.get(last, []), entry]
        else:
            section[last] = entry
    return made


def marked(job: Mapping[str, Any]) -> dict[str, Any]:
    """The job with episodes of two turns, whose rewards differ by turn and by episode."""
    return dict(job) | {
        "tasks": {"environment": "marking", "options": {"turns": 2}},
        "eval": None,
        # A turn ends by one of these before it is truncated, which would end the episode.
        "sampling": {"max_tokens": 8, "max_context": 48, "stop": list("56789+-*=")},
        "reward": [
            {"kind": "environment"},
            # What FAPO takes as flawed.
            {"kind": "regex", "name": "flawed", "weight": 0.0, "pattern": "^[02468]"},
        ],
    }


def _of_recipes() -> list[Part]:
    """Parts as recipes have them; of several recipes with a part, the first one counts."""
    found: dict[tuple[str, str], Part] = {}
    for recipe in built_in("recipes"):
        for each in named(resolve_job(_JOB | {"recipe": recipe})):
            if each.kind not in KINDS:
                continue
            follows = each.options_field.startswith(FOLLOWING)
            part = Part(
                each.kind, each.name, FOLLOWING if follows else FIELDS[each.kind], each.options
            )
            if each.options or (each.kind, each.name) not in found:
                found.setdefault((each.kind, each.name), part)
    return list(found.values())
