"""Recipes of evidence `code`: advantages and gradients of one update, theirs and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import resolve_job
from paceline.config.job import JobSpec
from paceline.config.recipes import recipe
from paceline.methods.objective.load import load_objective
from paceline.methods.parts.batch import Scale, TokenBatch
from paceline.methods.parts.proximal import Between
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.plugins import Context, GroupOutcome, registry
from paceline.testing.advantages import episode_batch
from paceline_harness.methods.releases import RELEASES, SOURCES, Sample

JOB: dict[str, Any] = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": [{"kind": "exact"}, {"kind": "exact", "name": "flawed", "weight": 0.0}],
}
REWARDS = (1.0, 1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0)
GROUPS = (4, 0, 4, 7, 4, 0, 7, 4)  # rewards of group 0 are equal
TURNS = (
    (0, 1, 1.0, True), (0, 2, 0.55, False), (1, 1, 1.0, True), (2, 1, 0.19, False),
    (2, 1, 1.0, True), (3, 2, 1.0, True), (3, 1, 1.0, True), (3, 1, 0.1, False),
    (4, 2, 1.0, True), (5, 1, 1.0, True), (6, 1, 0.3, False), (6, 1, 0.8, True),
    (7, 1, 1.0, True), (7, 2, 1.0, True),
)  # fmt: skip
LENGTHS = tuple(sum(n for e, n, *_ in TURNS if e == episode) for episode in range(8))
PARTS = {"one": REWARDS, "two": (0.0, 0.5, 1.0, 0.0, 1.0, 0.5, 0.0, 0.25)}
FLAWED = {"exact": REWARDS, "flawed": (1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)}
DRAWS = {"far": (3.0, 82), "otherwise far": (3.0, 21), "near": (0.05, 0)}
"""Largest log-ratio, and seed; near ones are inside of most bounds."""
ENGINES = frozenset({"decoupled_ppo", "old_logits_interpolated", "dart", "tis", "icepop", "mis"})
"""Releases that tell the engine's log-probs from those of the trainer at the start of the step."""
ONE_UPDATE = frozenset({"reinforce", "rloo", "vcpo"})  # whose weights are of the current policy


def moved(size: float, seed: int) -> Tensor:
    """Differences of log-probs from -size to size, in an order of their own."""
    order = np.random.default_rng(seed).permutation(sum(LENGTHS))
    return torch.tensor(np.linspace(-size, size, sum(LENGTHS))[order])


def sample(name: str, draw: str) -> Sample:
    size, seed = DRAWS[draw]
    start = -0.1 - torch.tensor(np.random.default_rng(0).random(sum(LENGTHS)))
    logprobs = start if name in ONE_UPDATE else start + moved(size, seed + 1)
    behaviour = start - moved(size, seed + 2) if name in ENGINES | ONE_UPDATE else start
    entropy = torch.tensor(np.random.default_rng(seed + 11).random(sum(LENGTHS)))
    return Sample(
        rewards=REWARDS,
        groups=tuple(range(8)) if name == "mssr" else GROUPS,
        lengths=LENGTHS,
        logprobs=logprobs.clone().requires_grad_(),
        start=start,
        behaviour=behaviour,
        reference=logprobs + moved(size, seed + 3),
        entropy=entropy.requires_grad_(),
        ages=torch.arange(sum(LENGTHS)) % 5,
        parts={"gdpo": PARTS, "fapo": FLAWED}.get(name, {}),
        turns=TURNS if name == "ui_s1" else (),
        rates=(2 / 3, 0.5, 0.5, 0.1, 2 / 3, 0.5, 0.5, 0.5) if name == "mssr" else (),
    )


@dataclass(frozen=True)
class Known:
    """What the trainer knows before the updates of a step."""

    sample: Sample
    num_updates: int

    @property
    def behaviour(self) -> Tensor:
        return self.sample.behaviour

    @property
    def ages(self) -> Tensor:
        return self.sample.ages

    def current(self) -> Tensor:
        return self.sample.start

    def sampled(self) -> Tensor:
        raise NotImplementedError

    def averaged(self) -> Tensor:
        raise NotImplementedError


def advantages(spec: JobSpec, s: Sample) -> Tensor:
    assert not spec.experience.advantage_shaping
    part = spec.experience.advantage
    batch = episode_batch(
        s.rewards,
        s.groups,
        lengths=s.lengths,
        tasks=[0, 1, 2, 3, 0, 5, 6, 7],
        parts=s.parts,
        turns=[(episode, tokens, score) for episode, tokens, score, _ in s.turns],
    )
    if batch.turns is not None and s.turns:
        matched = np.array([each[3] for each in s.turns])
        batch = replace(batch, turns=replace(batch.turns, matched=matched))
    context = Context(step=3, total_steps=9, memory={"0": [6.0, 3.0], "3": [0.5, 4.5]})
    found = registry.installed("advantages")[part.kind].load()(batch, context, **part.options)
    values = getattr(found, "values", found)
    return torch.tensor(values) if len(values) == sum(LENGTHS) else s.spread(values)


def tokens_of(spec: JobSpec, s: Sample, a: Tensor, updates: int) -> TokenBatch:
    objective = load_objective(spec.trainer.objective)
    centre = objective.centre(Known(s, updates))
    between = centre if isinstance(centre, Between) else None
    return TokenBatch(
        logprobs=s.logprobs,
        behaviour=s.behaviour,
        advantages=a,
        sequences=torch.arange(8).repeat_interleave(torch.tensor(LENGTHS)),
        num_sequences=8,
        scale=Scale(sum(LENGTHS), 8),
        proximal=centre.logprobs if isinstance(centre, Between) else centre,
        between=between.share if between else None,
        keys=torch.arange(sum(LENGTHS)),
        reference=s.reference,
        entropy=s.entropy,
        ages=s.ages,
    )


def gradients(s: Sample, loss: Tensor) -> Mapping[str, list[float]]:
    of = {"logprobs": s.logprobs, "entropy": s.entropy}
    found = torch.autograd.grad(loss, list(of.values()), materialize_grads=True)
    return {name: each.tolist() for name, each in zip(of, found, strict=True)}


def compare(name: str, s: Sample) -> None:
    spec = resolve_job(JOB | {"recipe": name})
    a = advantages(spec, s)
    theirs, their_loss = RELEASES[name](s)
    assert a.tolist() == pytest.approx(theirs.tolist(), rel=1e-6, abs=1e-6)
    tokens = tokens_of(spec, s, a, 1 if name in ONE_UPDATE else 4)
    objective = load_objective(spec.trainer.objective)
    assert tokens.entropy is not None
    fixed = replace(tokens, logprobs=s.logprobs.detach(), entropy=tokens.entropy.detach())
    ours = gradients(s, objective.loss(tokens, objective.plan(WholeBatch(fixed))).value)
    for column, values in gradients(s, their_loss).items():
        largest = max(map(abs, values))
        assert ours[column] == pytest.approx(values, rel=1e-6, abs=1e-6 * largest), column
    assert any(ours["logprobs"])


def test_each_recipe_of_this_evidence_has_its_release() -> None:
    named = registry.installed("recipes")
    assert {each for each in named if recipe(each).method.evidence == "code"} == set(RELEASES)
    assert all(SOURCES.values())


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", sorted(RELEASES))
def test_recipes_train_as_their_releases(name: str, draw: str) -> None:
    compare(name, sample(name, draw))


@pytest.mark.parametrize("name", ["reinforce_pp", "ui_s1"])
def test_groups_of_one_are_trained_as_there(name: str) -> None:
    """The others need groups; of UI-S1 an episode may be alone after others were dropped."""
    compare(name, replace(sample(name, "near"), groups=(4, 9, 4, 7, 4, 0, 7, 4)))


def test_a_token_that_the_engine_calls_impossible_has_weight_1() -> None:
    s = sample("decoupled_ppo", "near")
    behaviour = s.behaviour.clone()
    behaviour[5] = -math.inf
    compare("decoupled_ppo", replace(s, behaviour=behaviour))


def test_rewards_that_hardly_differ_from_their_baselines_are_hardly_amplified() -> None:
    s = sample("mssr", "near")
    compare("mssr", replace(s, rewards=[rate + 1e-4 * i for i, rate in enumerate(s.rates)]))


def test_vcpo_scales_the_learning_rate() -> None:
    """staleness_utils.py compute_ess_info; megatron_actor.py, scaling_rule sqrt, base 1."""
    s = sample("vcpo", "far")
    spec = resolve_job(JOB | {"recipe": "vcpo"})
    tokens = tokens_of(spec, s, s.spread(REWARDS), 1)
    fixed = replace(tokens, logprobs=s.logprobs.detach())
    found = load_objective(spec.trainer.objective, spec.trainer.hooks)
    weights = [float(row.sum().exp()) for row in s.rows(s.logprobs.detach() - s.behaviour)]
    share = sum(weights) ** 2 / (sum(w * w for w in weights) + 1e-8) / 8
    factor = found.scale_step(WholeBatch(fixed)).factor
    assert factor == pytest.approx(math.sqrt(min(1.0, share)), rel=1e-6)


@pytest.mark.parametrize("kls", [[], [0.0], [0.004, 0.006], [0.011], [1.0, *[0.005] * 10]], ids=str)
def test_mssr_counts_as_its_tracker(kls: list[float]) -> None:
    """MVSRValueTracker.update and _get_adaptive_rho; window 10, v_init 0.5, rho_min 0.875."""
    options = resolve_job(JOB | {"recipe": "mssr"}).experience.advantage.options
    outcomes = [GroupOutcome(0, (1.0,), ("",)), GroupOutcome(5, (0.0,), ("",)),
                GroupOutcome(0, (0.0,), ("",))]  # fmt: skip
    context = Context(
        step=3, total_steps=9, memory={"0": [6.0, 3.0]}, outcomes=outcomes,
        metrics=[{"kl_reference": each, "kl_behaviour": 7.0} for each in kls],
    )  # fmt: skip
    function = registry.installed("advantages")["mssr"].load()
    found = function(episode_batch([1.0], [0]), context, **options)
    rho = (0.875 + 0.96) / 2
    if kls:
        share = float(np.mean(kls[-10:])) / 0.01
        rho = 0.96 - min(share, 1) * 0.085 if share > 1 else 0.875 + share * 0.085
    expected = {"0": (rho * (rho * 6 + 1), rho * (rho * 3) + 1), "5": (rho * 4, rho * 4 + 1)}
    assert {k: pytest.approx(v) for k, v in found.memory.items()} == expected
