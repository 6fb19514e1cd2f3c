"""Generates the table of recipes in docs/methods.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import resolve_job
from paceline.config.named import named
from paceline.config.recipes import Recipe, recipe
from paceline.plugins import declared, registry

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "methods.md"
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
BEGIN = "<!-- table: written by dev/recipes_table.py -->\n"
END = "<!-- end of table -->\n"
JOB = {
    "name": "any",
    "model": {"path": "any"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
}

# What `benchmarks/staleness.py` and `benchmarks/learning/generation.py` say of the claims that they
# can test.
SEEN = {
    "m2po": "in part",
    "minpro": "against M2PO and GSPO",
    "decoupled_ppo": "the accuracy",
    "vcpo": "stable at a lag of 64",
    "vade": "0.53 of the tokens",
    "dart": "0.65 of the rollouts at equal reward",
    "rac": "learns chains of sums that GRPO does not",
}


def files() -> dict[Path, str]:
    """Path and content of the file."""
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    return {DOCUMENT: head + BEGIN + table() + END + tail}


def table() -> str:
    """The table as Markdown."""
    head = [
        "| recipe | method | sets | needs | evidence | claim | seen | held-out reward |",
        "|---|---|---|---|---|---|---|--:|",
    ]
    rewards = _rewards()
    names = sorted(registry.built_in("recipes"))
    rows = (_row(recipe(name), rewards.get(name, "")) for name in names)
    return "\n".join([*head, *rows]) + "\n"


def _rewards() -> dict[str, str]:
    """The mean over seeds after the runs of `benchmarks/recipes.py`."""
    measured = json.loads(RESULTS.read_text())["recipes"]
    return {
        name: f"{statistics.mean(run['eval_after'] for run in runs):.3f}"
        for name, runs in measured.items()
    }


def _row(each: Recipe, reward: str) -> str:
    sets = ", ".join(f"`{kind}`" for kind in _kinds(each.fragment()))
    needs = ", ".join(f"`{need}`" for need in _needs(each.name))
    method = each.method
    seen = SEEN.get(each.name, "not tested" if method.claim else "")
    cells = (f"`{each.name}`", each.title, sets, needs, method.evidence, method.claim, seen, reward)
    return "| " + " | ".join(cells) + " |"


def _kinds(value: Any) -> Iterator[str]:
    """Names of the plug-ins in a fragment."""
    if isinstance(value, dict):
        if "kind" in value:
            yield value["kind"]
        for inner in value.values():
            yield from _kinds(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _kinds(inner)


def _needs(name: str) -> list[str]:
    """What the plug-ins of a recipe declare."""
    found: set[str] = set()
    own = {*_kinds(recipe(name).fragment())}
    for each in named(resolve_job(JOB | {"recipe": name})):
        if each.name in own and each.kind in {"advantages", *registry.SLOTS}:
            source = registry.options_of(each.kind, each.name)
            found.update(declared(source).needs_with(each.options))
    return sorted(found)
