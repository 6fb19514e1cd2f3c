"""Checkpoints that others read: an export, or a job that starts from one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config.job import OptimizerSpec
from paceline.errors import IntegrityError, NotFoundError
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.folders import checkpoints_of, saved_checkpoint
from paceline_trainer.checkpoints.format import file_of
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer


class Job:
    """A policy, its optimiser and its checkpoints."""

    def __init__(self, base: Path, name: str, model: Path, group: RankGroup, keep: int = 2) -> None:
        self.policy: PolicyModel = load_policy(str(model))
        shard(self.policy, group, dtype="float32")
        self.optimizer = Optimizer(self.policy, OptimizerSpec(), total_steps=10)
        place = checkpoints_of(str(base), name)
        self.checkpoints = Checkpoints(place, group=group, keep=keep, incarnation=1)

    @torch.no_grad()
    def save(self, step: int, retained: tuple[int, ...] = ()) -> str:
        for parameter in self.policy.parameters():
            parameter.fill_(step)
        staged = self.checkpoints.stage(step, self.policy, self.optimizer)
        digest = self.checkpoints.write(staged).digest
        self.checkpoints.clean_up(newest=step, retained=retained)
        return digest


def test_another_job_starts_from_a_checkpoint(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    first, second = (Job(tmp_path, name, llama, group) for name in ("first", "second"))
    digest = first.save(10)
    first.save(20)
    saved = saved_checkpoint(str(tmp_path), "first", step=10, digest=digest)
    saved.verify()
    assert second.checkpoints.load_saved(saved, second.policy, second.optimizer)
    assert {float(p.flatten()[0].detach()) for p in second.policy.parameters()} == {10.0}
    assert second.checkpoints.steps() == []


def test_retained_checkpoints_stay_beside_the_newest(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    job = Job(tmp_path, "job", llama, group, keep=1)
    job.save(10)
    job.save(20, retained=(10,))
    job.save(30, retained=(10, 99))
    assert job.checkpoints.steps() == [10, 30]
    assert job.checkpoints.kept(30) == [30]
    job.save(40, retained=(30,))
    assert job.checkpoints.steps() == [30, 40]


def test_what_is_not_the_checkpoint_is_not_found(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    job = Job(tmp_path, "job", llama, group)
    digest = job.save(10)
    with pytest.raises(NotFoundError, match=r"no checkpoint of step 7; there are: 10"):
        saved_checkpoint(str(tmp_path), "job", step=7)
    with pytest.raises(NotFoundError, match=r"there are: none"):
        saved_checkpoint(str(tmp_path), "other", step=10)
    with pytest.raises(IntegrityError, match="not the one that the ledger knows"):
        saved_checkpoint(str(tmp_path), "job", step=10, digest="0" * 64)
    weights = Path(checkpoints_of(str(tmp_path), "job"), "step-000010.1", file_of(0))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(IntegrityError, match="not as it was written"):
        saved_checkpoint(str(tmp_path), "job", step=10, digest=digest).verify()
    weights.unlink()
    with pytest.raises(IntegrityError, match=r"rank-00000\.safetensors is missing"):
        saved_checkpoint(str(tmp_path), "job", step=10, digest=digest)
