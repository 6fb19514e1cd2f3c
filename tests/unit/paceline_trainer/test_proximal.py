"""Proximal policies of earlier and averaged weights, and what a checkpoint keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.job import OptimizerSpec
from paceline.config.objective import ObjectiveSpec
from paceline.methods.objective.load import load_objective
from paceline.methods.parts.batch import Scale, TokenBatch
from paceline.v1 import types_pb2
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.columns import Columns, Share, columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.average import WeightAverage
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.mismatch.comparison import Mismatch
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.scorer import TokenScorer
from paceline_trainer.step.versions import VersionSteps, WeightHistory


class Parts:
    """A policy with everything that scores its tokens."""

    def __init__(
        self,
        path: Path,
        group: RankGroup,
        *,
        beta: float = 0.5,
        reset_below: float = 0.0,
        **slots: Any,
    ) -> None:
        self.policy = load_policy(str(path))
        shard(self.policy, group, dtype="float32")
        history = WeightHistory(self.policy, dtype="float32", max_versions=4, max_bytes=1 << 30)
        versions = VersionSteps(group)
        self.mismatch = Mismatch(
            group=group, history=history, versions=versions, num_sequences=0, budget=100, once=False
        )
        self.scoring = TokenScorer(policy=self.policy, group=group, budget=60)
        self.average = WeightAverage(self.policy, beta=beta, reset_below=reset_below)
        self.optimizer = Optimizer(self.policy, OptimizerSpec(lr=1e-2), total_steps=10)
        self.learner = Learner(
            policy=self.policy,
            optimizer=self.optimizer,
            objective=load_objective(ObjectiveSpec.model_validate({"corrections": []} | slots)),
            group=group,
            budget=60,
            mismatch=self.mismatch,
            average=self.average,
        )

    def publish(self, version: int) -> None:
        self.mismatch.history.copy(version)
        self.mismatch.versions.published(version, version)

    def now(self, data: Columns) -> torch.Tensor:
        every = self.scoring.parts(data, [torch.arange(data.num_sequences).numpy()])
        return self.scoring.score(data, every).logprobs


@torch.no_grad()
def move(policy: PolicyModel, factor: float = 1.1) -> None:
    for parameter in policy.parameters():
        parameter.mul_(factor)


def mixed(samples: list[Any], first: int, second: int) -> list[Any]:
    """Half of the tokens of each sequence by one version, the others by a later one."""
    for sample in samples:
        count = len(sample.logprobs)
        runs = [(first, count // 2), (second, count - count // 2)]
        del sample.versions[:]
        sample.versions.extend(types_pb2.VersionRun(version=v, count=n) for v, n in runs)
    return samples


def share_of(samples: list[Any], step: int) -> Share:
    data = columns(samples)
    age_steps = {version: version for version in range(step + 1)}
    return Share(
        "b", step, data.num_sequences, data.num_tokens, tuple(samples), age_steps=age_steps
    )


def test_each_token_is_scored_by_the_version_that_sampled_it(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    parts = Parts(llama, group)
    data = columns(mixed(make_samples(6), 3, 4))
    parts.publish(3)
    third = parts.now(data)
    move(parts.policy)
    parts.publish(4)
    fourth = parts.now(data)
    move(parts.policy)
    parts.publish(5)
    present = parts.now(data)
    found = parts.scoring.sampled(data, parts.mismatch.history, parts.mismatch.versions)
    by_third = torch.from_numpy(data.versions == 3)
    assert by_third.any()
    assert not by_third.all()
    assert torch.allclose(found, torch.where(by_third, third, fourth), atol=1e-6)
    assert not torch.allclose(third, fourth, atol=1e-3)
    assert torch.equal(parts.now(data), present)


def test_a_version_that_is_not_kept_is_interpolated_and_counted(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    parts = Parts(llama, group, proximal="snapshot")
    parts.mismatch.versions.published(3, 3)  # its weights are not kept
    parts.publish(4)
    samples = mixed(make_samples(6), 3, 4)
    data = columns(samples)
    missing = float((data.versions == 3).mean())
    metrics = parts.learner.step(share_of(samples, step=5))
    assert metrics["interpolated"] == pytest.approx(missing)
    assert metrics["token_age"] == pytest.approx(1.0 + missing)
    assert metrics["token_age_max"] == 2.0


def test_interpolated_costs_no_forward_and_lies_between() -> None:
    """AReaL's code: sampled by version 3, trained from version 6: two thirds of the way."""
    objective = load_objective(ObjectiveSpec.model_validate({"proximal": "interpolated"}))

    class Known:
        behaviour = torch.tensor([-1.3, -1.3, -1.3])
        ages = torch.tensor([3, 0, 1])

    found: Any = objective.centre(Known())  # type: ignore[arg-type]
    tokens = TokenBatch(
        logprobs=torch.tensor([-1.0, -1.0, -1.0]),
        behaviour=Known.behaviour,
        advantages=torch.ones(3),
        sequences=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        scale=Scale(3, 1),
        between=found.share,
    )
    assert tokens.old.tolist() == pytest.approx([-1.1, -1.3, -1.3])


def test_ages_count_from_the_steps_in_the_batch() -> None:
    """Version 8 was published at step 20 and lost its weights to a rewind to step 12."""
    versions = np.array([9, 8, 6, 3, 9])
    share = Share("b", 14, 1, 5, (), age_steps={6: 10, 8: 12, 9: 13})
    assert share.ages(versions).tolist() == [1, 2, 4, 4, 1]
    assert Share("b", 14, 1, 5, ()).ages(versions).tolist() == [0] * 5


def test_the_average_of_weights(llama: Path, group: RankGroup) -> None:
    """Weights 1, 2, 4 times the first ones with b = 0.5: 1, 1.666667, then 3."""
    parts = Parts(llama, group)
    first = next(iter(parts.policy.parameters())).detach().clone()
    found: list[float] = []
    for factor in (2.0, 2.0):
        move(parts.policy, factor)
        assert not parts.average.follow(1.0)
        with parts.average.restored():
            held = next(iter(parts.policy.parameters()))
            found.append(float((held.detach() / first).mean()))
    assert found == pytest.approx([5 / 3, 3.0], rel=1e-5)
    assert float((next(iter(parts.policy.parameters())).detach() / first).mean()) == 4.0


def test_the_average_starts_again_if_few_tokens_are_active(llama: Path, group: RankGroup) -> None:
    parts = Parts(llama, group, reset_below=0.9)
    move(parts.policy)
    assert parts.average.follow(0.5)
    with parts.average.restored():
        held = [p.detach().clone() for p in parts.policy.parameters()]
    assert all(map(torch.equal, held, parts.policy.parameters()))


@pytest.mark.parametrize("beta", [0.5, 0.8])
def test_training_with_an_average_resumes_bit_equal(
    llama: Path, group: RankGroup, make_samples: Any, tmp_path: Path, beta: float
) -> None:
    slots: dict[str, Any] = {"proximal": {"kind": "ewma", "reset_below": 0.0}}
    expected: dict[str, float] = {}
    whole = Parts(llama, group, beta=beta, **slots)
    for step in range(4):
        expected = whole.learner.step(share_of(make_samples(8, seed=step), step))
        if step == 1:
            checkpoints = Checkpoints(tmp_path, group=group, keep=1)
            state = whole.learner.state()
            checkpoints.save(2, whole.policy, whole.optimizer, state)
    resumed = Parts(llama, group, beta=beta, **slots)
    state = resumed.learner.state()
    assert Checkpoints(tmp_path, group=group, keep=1).load(
        2, resumed.policy, resumed.optimizer, state
    )
    found: dict[str, float] = {}
    for step in (2, 3):
        found = resumed.learner.step(share_of(make_samples(8, seed=step), step))
    assert found == expected
    assert expected["kl_proximal"] > 0.0
    assert all(map(torch.equal, whole.policy.parameters(), resumed.policy.parameters()))


def test_a_checkpoint_without_an_average_says_so(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    parts = Parts(llama, group)
    checkpoints = Checkpoints(tmp_path, group=group, keep=1)
    checkpoints.save(1, parts.policy, parts.optimizer)
    move(parts.policy)
    assert not checkpoints.load(1, parts.policy, parts.optimizer, parts.learner.state())
    parts.learner.start_again()
    with parts.average.restored():
        held = [p.detach().clone() for p in parts.policy.parameters()]
    assert all(map(torch.equal, held, parts.policy.parameters()))
