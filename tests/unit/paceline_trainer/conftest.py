from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpc import aio
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import wire
from paceline.enums import JobState
from paceline.errors import FencedError, StateError, UnavailableError
from paceline.telemetry.metrics import Metrics
from paceline.transport.rpc import SERVER_OPTIONS, ErrorInterceptor
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import roster_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import (
    ExperienceServicer,
    add_ExperienceServicer_to_server,
)
from paceline.v1.jobs_pb2_grpc import JobsServicer, add_JobsServicer_to_server
from paceline.v1.roster_pb2_grpc import RosterServicer, add_RosterServicer_to_server
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.staging import Staging
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import place_of
from paceline_trainer.weights.publish import WeightCopy, fill

VOCAB = 32
WORKER = Path(__file__).with_name("ranks.py")
MakeSamples = Callable[..., list[pb.TrainSample]]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with tied weights, in Hugging Face layout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def make_samples() -> MakeSamples:
    return samples


def samples(
    count: int, *, seed: int = 0, version: int = 0, temperature: float = 1.0, longest: int = 12
) -> list[pb.TrainSample]:
    """Sequences of prompt, answer, environment text, answer, with random contents."""
    chance = np.random.default_rng(seed)
    made: list[pb.TrainSample] = []
    for index in range(count):
        prompt, first, middle, last = (int(x) for x in chance.integers(1, longest, 4))
        ends = np.cumsum([prompt, first, middle, last]).tolist()
        policy = first + last
        made.append(
            pb.TrainSample(
                group_id=f"g{index // 4}",
                index=index % 4,
                row=index,
                tokens=chance.integers(0, VOCAB, ends[-1]).tolist(),
                spans=[
                    types_pb2.TokenSpan(
                        start=0, end=ends[0], source=types_pb2.TOKEN_SOURCE_TEMPLATE
                    ),
                    types_pb2.TokenSpan(
                        start=ends[0], end=ends[1], source=types_pb2.TOKEN_SOURCE_POLICY
                    ),
                    types_pb2.TokenSpan(
                        start=ends[1], end=ends[2], source=types_pb2.TOKEN_SOURCE_ENVIRONMENT
                    ),
                    types_pb2.TokenSpan(
                        start=ends[2], end=ends[3], source=types_pb2.TOKEN_SOURCE_POLICY
                    ),
                ],
                logprobs=(-3.0 * chance.random(policy)).tolist(),
                versions=[types_pb2.VersionRun(version=version, count=policy)],
                advantages=[float(chance.normal())],
                temperature=temperature,
                weight=1.0,
            )
        )
    return made


@pytest.fixture
def run_ranks() -> Callable[[int, str, Path], None]:
    """Run `ranks.py` under torchrun."""
    return _run_ranks


@pytest.fixture
def stage() -> Callable[[WeightCopy], Staging]:
    """Stage a copy of the weights, as those that are served."""
    return _stage


def _stage(snapshot: WeightCopy) -> Staging:
    entries, num_bytes = snapshot.entries, snapshot.num_bytes
    staging = Staging(SnapshotHeader("j", 7, 4, 6, -1, 1, num_bytes, 4096, entries, snapshot.tied))
    fill(staging, snapshot.tensors)
    return staging


def _run_ranks(world: int, what: str, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", str(WORKER), what, str(folder)]
    environment = {**os.environ, **place_of(world)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


class OneJob(ExperienceServicer, RosterServicer, JobsServicer):
    """A minimal ledger of one job: hands out batches of random samples, fences, counts."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = {}
        self.incarnation = 0
        self.step = 0
        self.state = JobState.RUNNING
        self.reason = ""
        self.limit = 4  # number of steps before it returns `finished`
        self.failures: list[tuple[int, str]] = []
        self.holds_from = 1 << 30  # the first step whose batch is withheld
        self.fresh = False  # whether a batch waits until the weights of its step are served
        self.versions: list[roster_pb2.PublishVersionRequest] = []
        self.seeds: list[roster_pb2.PublishVersionRequest] = []  # for parts other than the first
        self.digests: dict[int, str] = {}  # by step
        self.known: list[int] = []  # the earlier answers that callers with a digest refer to
        self.forgetful = False  # assigns new numbers to repeated announcements
        self.key = bytes(range(32))
        self.chunk_bytes = 4096
        self.commits: list[tuple[int, int, dict[str, float]]] = []
        self.checkpoints: list[int] = []
        self.manifests: dict[int, str] = {}  # the digests that came with them
        self.rewinds: list[int] = []
        self.taken: list[tuple[int, int, int]] = []
        self.workers: dict[str, types_pb2.Worker] = {}
        self.address = ""

    def fence(self, request: Any) -> None:
        if request.incarnation < self.incarnation:
            raise FencedError(f"incarnation {request.incarnation} was replaced")
        self.incarnation = request.incarnation

    async def GetJob(self, request: Any, context: Any) -> types_pb2.Job:
        status = types_pb2.JobStatus(
            job_id=request.job_id,
            name="test",
            state=wire.number_of(self.state),
            step=self.step,
        )
        return types_pb2.Job(status=status, spec_json=json.dumps(self.spec))

    async def SetJobState(self, request: Any, context: Any) -> types_pb2.Job:
        self.state = wire.member_of(JobState, request.state, "state")
        self.reason = request.reason
        return types_pb2.Job()

    async def ReportFailure(self, request: Any, context: Any) -> pb.ReportFailureReply:
        self.failures.append((request.incarnation, request.reason))
        return pb.ReportFailureReply(failures=1, reason=request.reason)

    async def Rewind(self, request: Any, context: Any) -> pb.RewindReply:
        self.fence(request)
        self.rewinds.append(request.step)
        self.step = request.step
        return pb.RewindReply(step=request.step, parent_version=len(self.versions) - 1)

    async def TakeBatch(self, request: Any, context: Any) -> AsyncIterator[pb.BatchPart]:
        self.fence(request)
        if request.step >= self.holds_from:
            await asyncio.Event().wait()
        if self.step >= self.limit:
            yield pb.BatchPart(step=request.step, stop=types_pb2.STOP_REASON_FINISHED)
            return
        while self.fresh and request.step not in self.digests:
            await asyncio.sleep(0.01)
        self.taken.append((request.incarnation, request.step, request.rank))
        whole = samples(12, seed=request.step, version=len(self.versions) - 1)
        mine = whole[request.rank :: request.world]
        total = sum(len(sample.logprobs) for sample in whole)
        yield pb.BatchPart(
            batch_id=f"b{request.step}",
            step=request.step,
            total_sequences=len(whole),
            total_tokens=total,
            num_samples=len(mine),
            samples=mine[:3],
        )
        yield pb.BatchPart(samples=mine[3:])

    async def CommitStep(self, request: Any, context: Any) -> pb.CommitStepReply:
        self.fence(request)
        assert request.step == self.step
        assert request.batch_id == f"b{request.step}"
        metrics = dict(request.metrics)
        self.commits.append((request.incarnation, request.step, metrics))
        self.step += 1
        return pb.CommitStepReply(step=self.step)

    async def CommitCheckpoint(self, request: Any, context: Any) -> pb.CommitCheckpointReply:
        self.fence(request)
        assert "://" in request.path or Path(request.path).is_dir()
        self.checkpoints.append(request.step)
        self.manifests[request.step] = request.digest
        return pb.CommitCheckpointReply()

    async def ListCheckpoints(self, request: Any, context: Any) -> pb.ListCheckpointsReply:
        self.fence(request)
        return pb.ListCheckpointsReply(digests=self.manifests)

    async def PublishVersion(self, request: Any, context: Any) -> roster_pb2.PublishVersionReply:
        self.fence(request)
        if request.part:
            newest = self.versions[-1] if self.versions else None
            if newest is None or newest.step < request.step:
                raise UnavailableError("part 0 comes first")
            if newest.step > request.step:
                raise StateError("a later step is announced")
            self.seeds.append(request)
        elif request.digest:
            self.digests[request.step] = request.digest
            self.known.append(request.known_version if request.HasField("known_version") else -1)
            if self.forgetful:
                self.versions.append(request)
        else:
            self.versions.append(request)
        made = self.versions[-1]
        version = types_pb2.PolicyVersion(
            version=len(self.versions) - 1, step=made.step, parent=made.parent
        )
        if self.step >= self.limit and request.step == self.step:
            self.state = JobState.SUCCEEDED
        return roster_pb2.PublishVersionReply(
            version=version,
            key=self.key,
            chunk_bytes=self.chunk_bytes,
            source_endpoint=made.weights_endpoint,
        )

    async def Join(self, request: Any, context: Any) -> roster_pb2.JoinReply:
        self.workers[request.worker.worker_id] = request.worker
        return roster_pb2.JoinReply(lease_s=6)

    async def Heartbeat(self, request: Any, context: Any) -> roster_pb2.HeartbeatReply:
        self.workers[request.worker_id].active_version = request.active_version
        return roster_pb2.HeartbeatReply()

    async def Leave(self, request: Any, context: Any) -> roster_pb2.LeaveReply:
        self.workers.pop(request.worker_id, None)
        return roster_pb2.LeaveReply()


@pytest.fixture
async def one_job(llama: Path) -> AsyncIterator[OneJob]:
    """A ledger served over gRPC on loopback."""
    # Methods that a trainer never calls are not implemented.
    ledger = OneJob()  # pyright: ignore[reportAbstractUsage]
    ledger.spec = {
        "name": "test",
        "model": {"path": str(llama)},
        "tasks": {"environment": "arithmetic"},
        "reward": [{"kind": "exact"}],
        "trainer": {"optimizer": {"lr": 1e-3}, "checkpoint": {"every": 2, "keep": 2}},
    }
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())], options=SERVER_OPTIONS)
    add_ExperienceServicer_to_server(ledger, server)
    add_RosterServicer_to_server(ledger, server)
    add_JobsServicer_to_server(ledger, server)
    ledger.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield ledger
    await server.stop(0)
