"""What serves the weights of a job that trains nothing, without an optimiser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config.job import OptimizerSpec
from paceline.config.lifecycle.forks import ForkSpec
from paceline.enums import JobState
from paceline.errors import InvalidError
from paceline.platform.transport.rpc import connect
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights import HttpTransport, Staging, TransportSettings, pull
from paceline_harness.patience import PATIENCE_S
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.folders import checkpoints_of, saved_checkpoint
from paceline_trainer.checkpoints.format import file_of
from paceline_trainer.client import TrainerLedger
from paceline_trainer.liveness import TrainerLiveness
from paceline_trainer.phase_clock import PhaseClock
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.weights.policy_server import PolicyServer, ServingBackend
from paceline_trainer.weights.publish import Publisher, Snapshotter
from paceline_trainer.work_thread import WorkThread

Make = Callable[..., PolicyServer]


@pytest.fixture
async def server() -> AsyncIterator[tuple[HttpTransport, str]]:
    made = HttpTransport(TransportSettings(host="127.0.0.1"))
    yield made, await made.start()
    await made.close()


def opened(model: Path, group: RankGroup) -> PolicyModel:
    policy = load_policy(str(model))
    shard(policy, group, dtype="float32")
    return policy


@pytest.fixture
async def make(
    one_job: Any, llama: Path, group: RankGroup, tmp_path: Path, server: tuple[HttpTransport, str]
) -> AsyncIterator[Make]:
    """What serves the job, by incarnation and the checkpoint that it measures."""
    channel = connect(one_job.address)
    compute = ThreadPoolExecutor(1)

    def build(incarnation: int, fork: ForkSpec | None = None) -> PolicyServer:
        ledger = TrainerLedger(
            experience=ExperienceStub(channel),
            roster=RosterStub(channel),
            jobs=JobsStub(channel),
            job_id="j",
            incarnation=incarnation,
        )
        policy = opened(llama, group)
        snapshotter = Snapshotter(policy, group, engine_dtype="float32", dtype="float32")
        return PolicyServer(
            backend=ServingBackend(policy, snapshotter, group),
            checkpoint=lambda fork: saved_checkpoint(
                str(tmp_path), "j", step=int(fork.step), digest=fork.digest
            ),
            fork=fork,
            ledger=ledger,
            publisher=Publisher(
                ledger=ledger, transport=server[0], endpoint=server[1], incarnation=0
            ),
            compute=WorkThread(compute),
            clock=PhaseClock(),
        )

    yield build
    await channel.close()
    compute.shutdown()


async def weights(one_job: Any, server: tuple[HttpTransport, str]) -> dict[str, torch.Tensor]:
    """What is served as version 0."""
    key = one_job.key
    staging = await pull(
        [server[1]],
        job_id="j",
        version=0,
        stage=lambda header: Staging(header, key=key),
        timeout_s=PATIENCE_S,
        key=key,
    )
    return {
        entry.name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(entry.shape)
        for entry, data in staging.tensors()
    }


async def test_the_model_is_served_until_the_job_is_over(
    one_job: Any, llama: Path, make: Make, server: tuple[HttpTransport, str]
) -> None:
    made = make(1)
    watched = TrainerLiveness(clock=PhaseClock(), trainer=lambda: made)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(PATIENCE_S):
        while 0 not in one_job.digests:
            await asyncio.sleep(0.01)
        found, model = await weights(one_job, server), load_file(llama / "model.safetensors")
        assert {name: each.shape for name, each in found.items()} == {
            name: each.shape for name, each in model.items()
        }
        assert all(torch.equal(found[name], each.float()) for name, each in model.items())
        assert (watched.writing().pending, watched.status()["step"]) == (0, 0)
        assert (one_job.taken, one_job.checkpoints, one_job.rewinds) == ([], [], [])
        one_job.state = JobState.SUCCEEDED
        await running


async def test_another_start_publishes_the_same_bytes(one_job: Any, make: Make) -> None:
    """Canary and header included, so that a version may have the number of the one before."""
    one_job.state = JobState.PAUSING  # it ends once it has published
    await asyncio.wait_for(make(1).run(), PATIENCE_S)
    first = one_job.digests.pop(0)
    one_job.versions.clear()
    await asyncio.wait_for(make(2).run(), PATIENCE_S)
    assert one_job.digests == {0: first}
    assert {request.parent for request in one_job.versions} == {-1}


async def test_the_weights_of_a_checkpoint_are_served_and_a_damaged_one_is_not(
    one_job: Any,
    llama: Path,
    group: RankGroup,
    make: Make,
    server: tuple[HttpTransport, str],
    tmp_path: Path,
) -> None:
    policy = opened(llama, group)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.125)
    place = checkpoints_of(str(tmp_path), "j")
    checkpoints = Checkpoints(place, group=group, keep=2, incarnation=1)
    optimizer = Optimizer(policy, OptimizerSpec(), total_steps=10)
    digest = checkpoints.write(checkpoints.stage(7, policy, optimizer)).digest
    one_job.state = JobState.PAUSING
    fork = ForkSpec(job="parent", step=7, digest=digest)
    made = make(1, fork)
    await asyncio.wait_for(made.run(), PATIENCE_S)
    assert (made.step, [*one_job.digests]) == (7, [7])
    found, model = await weights(one_job, server), load_file(llama / "model.safetensors")
    assert all(torch.allclose(found[name], each.float() + 0.125) for name, each in model.items())
    path = Path(place, "step-000007.1", file_of(0))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidError, match=r"fork.step: .*step-000007"):
        await asyncio.wait_for(make(2, fork).run(), PATIENCE_S)
