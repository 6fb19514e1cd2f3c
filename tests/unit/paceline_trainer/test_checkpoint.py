from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.job import OptimizerSpec
from paceline.config.objective import ObjectiveSpec
from paceline.errors import FencedError, NotFoundError
from paceline.methods.objective.load import load_objective
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.format import INDEX, file_of
from paceline_trainer.columns import Share, columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import local


class Parts:
    """A policy, its optimiser and a learner over them."""

    def __init__(self, path: Path, group: RankGroup) -> None:
        self.policy: PolicyModel = load_policy(str(path))
        shard(self.policy, group, dtype="float32")
        spec = OptimizerSpec(lr=1e-2, weight_decay=0.1, schedule="cosine")
        self.optimizer = Optimizer(self.policy, spec, total_steps=10)
        self.learner = Learner(
            policy=self.policy,
            optimizer=self.optimizer,
            objective=load_objective(ObjectiveSpec()),
            group=group,
            budget=200,
        )

    def step(self, samples: list[Any], step: int) -> None:
        data = columns(samples)
        share = Share("b", step, data.num_sequences, data.num_tokens, tuple(samples))
        self.learner.step(share)

    def weights(self) -> torch.Tensor:
        full = [local(p.detach()) for p in self.policy.parameters()]
        return torch.cat([p.detach().reshape(-1) for p in full])


def test_resumed_training_is_bit_equal(
    llama: Path, group: RankGroup, make_samples: Any, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, group=group, keep=2)
    first = Parts(llama, group)
    for step in range(2):
        first.step(make_samples(8, seed=step), step)
    checkpoints.save(2, first.policy, first.optimizer)
    chance = torch.rand(3)
    first.step(make_samples(8, seed=2), 2)

    second = Parts(llama, group)
    checkpoints.load(2, second.policy, second.optimizer)
    assert torch.equal(torch.rand(3), chance)
    second.step(make_samples(8, seed=2), 2)
    assert torch.equal(first.weights(), second.weights())


def test_extras_are_filled_where_a_checkpoint_has_them(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    checkpoints, parts = Checkpoints(tmp_path, group=group, keep=2), Parts(llama, group)
    text = torch.arange(6).view(2, 3)
    for step, extras in ((1, {"text": text}), (2, {})):
        staged = checkpoints.stage(step, parts.policy, parts.optimizer, extras=extras)
        checkpoints.write(staged)
    for step, shape, filled in ((1, (2, 3), True), (1, (3, 3), False), (2, (2, 3), False)):
        found = {"text": torch.full(shape, -1)}
        checkpoints.load(step, parts.policy, parts.optimizer, extras=found)
        assert torch.equal(found["text"], text if filled else torch.full(shape, -1))


@pytest.mark.slow
def test_two_ranks_write_what_one_rank_reads(
    llama: Path, group: RankGroup, make_samples: Any, run_ranks: Any, tmp_path: Path
) -> None:
    samples = make_samples(25)
    job = {
        "path": str(llama),
        "objectives": [{}],
        "samples": [s.SerializeToString().hex() for s in samples],
        "header": [25, columns(samples).num_tokens],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks(2, "save", tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", group=group, keep=2)
    parts = Parts(llama, group)
    checkpoints.load(checkpoints.find(max_step=5).step, parts.policy, parts.optimizer)
    assert np.array_equal(parts.weights().numpy(), np.load(tmp_path / "weights.npy")[0])
    assert parts.optimizer.inner.state_dict()["state"]


def test_only_whole_checkpoints_count(llama: Path, group: RankGroup, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, group=group, keep=2)
    assert checkpoints.find(max_step=100).step == 0
    parts = Parts(llama, group)
    for step in (10, 20, 30):
        path = Path(checkpoints.save(step, parts.policy, parts.optimizer))
        assert path == Path(checkpoints.path(step))
    assert checkpoints.steps() == [20, 30]
    (tmp_path / "step-000050.0").mkdir()
    (tmp_path / "step-000050.0" / file_of(0)).write_bytes(b"half")
    shutil.copytree(path, tmp_path / "step-000060.0")
    (tmp_path / "step-000060.0" / INDEX).unlink()
    shutil.copytree(path, tmp_path / "step-000070.0")
    with (tmp_path / "step-000070.0" / file_of(0)).open("r+b") as data:
        data.truncate(1000)
    assert checkpoints.steps() == [20, 30]
    with pytest.raises(NotFoundError, match=r"no checkpoint of step 50; whole are \[20, 30\]"):
        checkpoints.load(50, parts.policy, parts.optimizer)
    assert checkpoints.find(max_step=29).step == 20
    checkpoints.discard_after(20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020.0"]


def test_the_one_before_stays_until_the_ledger_knows_the_next(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, group=group, keep=1)
    parts = Parts(llama, group)
    known = {
        step: checkpoints.write(checkpoints.stage(step, parts.policy, parts.optimizer)).digest
        for step in (10, 20)
    }
    del known[20]  # the trainer ends before it has told
    assert checkpoints.find(max_step=10, recorded=known).step == 10
    checkpoints.clean_up(newest=20)
    assert checkpoints.steps() == [20]


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_older_incarnation_replaces_nothing(
    llama: Path, group: RankGroup, tmp_path: Path, kind: str
) -> None:
    place = tmp_path if kind == "folder" else f"memory://{tmp_path}"
    parts = Parts(llama, group)
    newer = Checkpoints(place, group=group, keep=2, incarnation=2)
    older = Checkpoints(place, group=group, keep=2, incarnation=1)
    newer.save(5, parts.policy, parts.optimizer)
    with pytest.raises(FencedError):
        older.save(5, parts.policy, parts.optimizer)
    older.discard(5)
    older.discard_after(0)
    assert newer.steps() == [5]
    assert newer.path(5).endswith("step-000005.2")
    newer.discard(5)
    assert newer.steps() == []


def test_a_branch_that_was_left_does_not_count_against_the_newest(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    parts = Parts(llama, group)
    older = Checkpoints(tmp_path, group=group, keep=1, incarnation=1)
    newer = Checkpoints(tmp_path, group=group, keep=1, incarnation=2)
    older.save(50, parts.policy, parts.optimizer)
    newer.save(30, parts.policy, parts.optimizer)
    assert newer.steps() == [30]
