"""A trainer whose newest checkpoint is damaged, and the rewind of its ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config import JobSpec, parse_job
from paceline.errors import InvalidError
from paceline.methods.objective.load import load_objective
from paceline.platform.telemetry.metrics import Metrics
from paceline.v1 import types_pb2
from paceline_harness.patience import PATIENCE_S
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.format import file_of
from paceline_trainer.client import TrainerLedger
from paceline_trainer.gauges import ModelShape, TrainerGauges
from paceline_trainer.phase_clock import PhaseClock
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.mismatch.comparison import mismatch_of
from paceline_trainer.step.model import shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import local
from paceline_trainer.trainer import Trainer, TrainingBackend
from paceline_trainer.weights.publish import Snapshotter
from paceline_trainer.work_thread import WorkThread

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client
    from paceline_harness.experience_service.serving import Lives

SHARD = file_of(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class Trainers:
    """Starts of the trainer of one job, with real checkpoints of a tiny model."""

    def __init__(
        self, client: Client, job_id: str, *, model: Path, folder: Path, group: RankGroup
    ) -> None:
        self._job_id = job_id
        self.by_hand = client.trainer(job_id)
        self._model = model
        self._folder = folder
        self._group = group
        self._compute = ThreadPoolExecutor(1)
        self.metrics = Metrics()

    def close(self) -> None:
        self._compute.shutdown()

    def ledger(self, incarnation: int) -> TrainerLedger:
        own = self.by_hand.client
        return TrainerLedger(
            experience=own.experience,
            roster=own.roster,
            jobs=own.jobs,
            job_id=self._job_id,
            incarnation=incarnation,
        )

    def engine(self, incarnation: int) -> TrainingBackend:
        spec = parse_job(
            {
                "name": "j",
                "model": {"path": str(self._model)},
                "tasks": {"environment": "arithmetic"},
                "reward": [{"kind": "exact"}],
                "stop": {"steps": 10},
            }
        )
        policy = load_policy(str(self._model))
        shard(policy, self._group, dtype="float32")
        optimizer = Optimizer(policy, spec.trainer.optimizer, total_steps=10)
        mismatch = mismatch_of(spec, policy, self._group)
        learner = Learner(
            policy=policy,
            optimizer=optimizer,
            objective=load_objective(spec.trainer.objective),
            group=self._group,
            budget=200,
            mismatch=mismatch,
        )
        return TrainingBackend(
            policy=policy,
            optimizer=optimizer,
            learner=learner,
            checkpoints=Checkpoints(
                self._folder, group=self._group, keep=2, incarnation=incarnation
            ),
            snapshotter=Snapshotter(policy, self._group, engine_dtype="float32", dtype="float32"),
            mismatch=mismatch,
            group=self._group,
        )

    def trainer(self, engine: TrainingBackend, incarnation: int) -> Trainer:
        gauges = TrainerGauges(
            self.metrics, job_id=self._job_id, seconds=dict, shape=ModelShape(1, 1, 1), peak=None
        )
        return Trainer(
            engine=engine,
            ledger=self.ledger(incarnation),
            publisher=None,
            compute=WorkThread(self._compute),
            spec=JobSpec.model_fields["trainer"].get_default(call_default_factory=True),
            clock=PhaseClock(),
            gauges=gauges,
        )

    async def save(self, engine: TrainingBackend, step: int) -> None:
        """Commit a checkpoint whose weights encode their step."""
        trainer = self.trainer(engine, 1)
        with torch.no_grad():
            for parameter in engine.policy.parameters():
                parameter.fill_(step)
        trainer.step = step
        await trainer.checkpoint()
        await trainer.checkpointed()


def marks(engine: TrainingBackend) -> set[float]:
    full = (local(p.detach()) for p in engine.policy.parameters())
    return {value for each in full for value in each.detach().unique().tolist()}


def flip(path: Path) -> None:
    """Overwrite 64 bytes without changing the size."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0x55 for byte in data[middle : middle + 64])
    path.write_bytes(data)


@pytest.fixture
async def trained(
    lives: Lives, store_url: str, tmp_path: Path, model: Path, group: RankGroup
) -> AsyncIterator[tuple[Client, str, Any, Trainers]]:
    """A job after five steps, with checkpoints of the second and the fourth."""
    async with lives(store_url, tmp_path) as client:
        experience = {"batch_groups": 2, "group_size": 2, "max_staleness": 9, "lease_s": 1.0}
        job = await client.submit(stop={"steps": 6}, eval=None, experience=experience)
        job_id = job.status.job_id
        trainers = Trainers(
            client, job_id, model=model, folder=tmp_path / "checkpoints", group=group
        )
        by_hand = trainers.by_hand
        await by_hand.begin(0)
        engine = trainers.engine(1)
        async with client.environment():
            await by_hand.publish_version(0)
            for step in range(5):
                await by_hand.train(step)
                if step in {1, 3}:
                    await trainers.save(engine, step + 1)
        yield client, job_id, by_hand, trainers
        trainers.close()


async def test_the_job_resumes_from_the_previous_checkpoint(
    trained: tuple[Client, str, Any, Trainers], tmp_path: Path
) -> None:
    client, job_id, by_hand, trainers = trained
    flip(tmp_path / "checkpoints" / "step-000004.1" / SHARD)
    await by_hand.grant()
    engine = trainers.engine(2)
    trainer = trainers.trainer(engine, 2)
    await trainer.resume()
    assert (trainer.step, marks(engine)) == (2, {2.0})
    status = (await client.get(job_id)).status
    assert status.step == 2
    assert (
        "resumes from step 2: step-000004.1/rank-00000.safetensors is not as it was"
        in status.reason
    )
    told = trainers.metrics.registry.get_sample_value
    assert told("paceline_damaged_checkpoints", {"job": job_id}) == 1
    assert not (tmp_path / "checkpoints" / "step-000004.1").exists()
    await client.verify(job_id)
    async with client.environment():
        await by_hand.publish_version(2)
        assert [await by_hand.train(step) for step in (2, 3, 4, 5)] == ["", "", "", "finished"]
        await by_hand.take(6)
        await asyncio.wait_for(client.watch(job_id), PATIENCE_S)
    assert (await client.get(job_id)).status.state == types_pb2.JOB_STATE_SUCCEEDED
    await client.verify(job_id)


async def test_a_job_without_a_sound_checkpoint_fails_with_file_and_cause(
    trained: tuple[Client, str, Any, Trainers], tmp_path: Path
) -> None:
    client, job_id, by_hand, trainers = trained
    flip(tmp_path / "checkpoints" / "step-000004.1" / SHARD)
    (tmp_path / "checkpoints" / "step-000002.1" / "paceline.json").write_bytes(b'{"files": {"')
    await by_hand.grant()
    with pytest.raises(InvalidError) as caught:
        await trainers.trainer(trainers.engine(2), 2).resume()
    await trainers.ledger(2).fail(caught.value.message)
    status = (await client.get(job_id)).status
    assert status.state == types_pb2.JOB_STATE_FAILED
    assert "no intact checkpoint is left (cannot rewind to step 0" in status.reason
    assert "step-000004.1/rank-00000.safetensors is not as it was written" in status.reason
    assert "step-000002.1/paceline.json is damaged: JSONDecodeError" in status.reason
    assert (tmp_path / "checkpoints" / "step-000002.1" / SHARD).exists()
    await client.verify(job_id)
