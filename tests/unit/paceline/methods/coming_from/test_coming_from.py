"""Rows of docs/coming-from.md that map formulas: TRL's and verl's numbers, and ours.

`recorded.json` is from their own code (`make coming-from`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from paceline.config.base import PluginSpec
from paceline.config.objective import ObjectiveSpec
from paceline.methods.objective.load import load_objective
from paceline.methods.parts.batch import Scale, TokenBatch
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.plugins import Context, EpisodeBatch, registry
from paceline.testing.advantages import episode_batch

HERE = Path(__file__).parent
CASES: Mapping[str, Any] = yaml.safe_load((HERE / "cases.yaml").read_text())
BATCH: Mapping[str, Any] = CASES["batch"]
RECORDED: Mapping[str, Any] = json.loads((HERE / "recorded.json").read_text())
SYSTEMS = ("trl", "verl")
DOCS = Path(__file__).parents[5] / "docs" / "coming-from.md"
HEADS = {"trl": "## From TRL", "verl": "## From verl"}
FORMULAS = ("trainer.objective", "experience.advantage", "surrogate", "`kl`", "`tis`")
"""What the second column of a row names if it maps a formula."""
NO_NUMBER = {"`algorithm.filter_groups`", "`bypass_old_logprob_for_rollout`"}
EVERY = [
    pytest.param(system, number, id=f"{system}-{case['row']}-{number}")
    for system in SYSTEMS
    for number, case in enumerate(CASES[system])
]


def tokens() -> TokenBatch:
    lengths = torch.tensor(BATCH["lengths"])
    return TokenBatch(
        logprobs=torch.tensor(BATCH["logprobs"], requires_grad=True),
        behaviour=torch.tensor(BATCH["behaviour"]),
        advantages=torch.tensor(BATCH["advantages"]).repeat_interleave(lengths),
        sequences=torch.arange(len(lengths)).repeat_interleave(lengths),
        num_sequences=len(lengths),
        scale=Scale(int(lengths.sum()), len(lengths)),
        proximal=torch.tensor(BATCH["old"]),
        keys=torch.arange(int(lengths.sum())),
        reference=torch.tensor(BATCH["reference"]),
        entropy=torch.tensor(BATCH["entropies"], requires_grad=True),
    )


def numbers_of_the_objective(job: Mapping[str, Any]) -> dict[str, list[float]]:
    objective = load_objective(ObjectiveSpec.model_validate({"corrections": [], **job}))
    batch = tokens()
    assert batch.entropy is not None
    fixed = replace(batch, logprobs=batch.logprobs.detach(), entropy=batch.entropy.detach())
    plan = objective.plan(WholeBatch(fixed))
    objective.loss(batch, plan).value.backward()
    assert batch.logprobs.grad is not None
    numbers = {"gradient": batch.logprobs.grad.tolist()}
    if batch.entropy.grad is not None:
        numbers["gradient_of_entropies"] = batch.entropy.grad.tolist()
    return numbers


def numbers_of_the_advantage(part: Any) -> dict[str, list[float]]:
    spec = PluginSpec.model_validate(part)
    function = registry.installed("advantages")[spec.kind].load()
    parts: dict[str, list[float]] = BATCH["rewards"]
    sums = [sum(values) for values in zip(*parts.values(), strict=True)]
    batch: EpisodeBatch = episode_batch(
        sums, BATCH["groups"], lengths=BATCH["lengths"], parts=parts
    )
    values = function(batch, Context(step=0, total_steps=1), **spec.options)
    return {"advantages": values.tolist()}


@pytest.mark.parametrize(("system", "number"), EVERY)
def test_both_sides_compute_the_same(system: str, number: int) -> None:
    job = CASES[system][number]["job"]
    if "advantage" in job:
        ours = numbers_of_the_advantage(job["advantage"])
    else:
        ours = numbers_of_the_objective(job)
    theirs = RECORDED[system][number]
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=1e-4, abs=2e-6), name


def rows(system: str) -> dict[str, str]:
    """The second column by the first."""
    section = DOCS.read_text().partition(f"{HEADS[system]}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line[:1] == "|"]
    return dict(cells[2:])


def names_in(value: Any) -> set[str]:
    """Kinds and options of a part of a job."""
    if isinstance(value, Mapping):
        items = dict(value)
        kind = {str(items.pop("kind"))} if "kind" in items else set[str]()
        return kind.union(*({name} | names_in(each) for name, each in items.items()))
    if isinstance(value, list):
        return set[str]().union(*map(names_in, value))
    return {value} if isinstance(value, str) else set[str]()


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_row_that_maps_a_formula_is_tested_and_says_what_is(system: str) -> None:
    table = rows(system)
    cases = CASES[system]
    for case in cases:
        [text] = [second for first, second in table.items() if case["row"] in first]
        fields = names_in(list(case["job"].values()))
        missing = {name for name in fields if name not in text}
        assert not missing, (case["row"], missing)
    formulas = [first for first, second in table.items() if any(f in second for f in FORMULAS)]
    untested = {each for each in formulas if not any(case["row"] in each for case in cases)}
    assert untested <= NO_NUMBER
