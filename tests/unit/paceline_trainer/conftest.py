from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpc import aio
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.enums import JobState
from paceline.errors import FencedError, StateError, UnavailableError
from paceline.platform import wire
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import roster_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import (
    ExperienceServicer,
    add_ExperienceServicer_to_server,
)
from paceline.v1.jobs_pb2_grpc import JobsServicer, add_JobsServicer_to_server
from paceline.v1.roster_pb2_grpc import RosterServicer, add_RosterServicer_to_server
from paceline.weights.canary import Canary
from paceline.weights.snapshot.staging import Staging
from paceline_harness.models.published import staged
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port
from paceline_harness.processes import place_of
from paceline_trainer.weights.publish import WeightCopy

VOCAB = 32
WORKER = Path(__file__).with_name("ranks.py")
FORKED = Path(__file__).with_name("forked.py")
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


class Forked:
    """A program that `forked.py` runs."""

    def __init__(self, pid: int, output: Path, code: Path) -> None:
        self.pid = pid
        self._output = output
        self._code = code

    @property
    def code(self) -> int | None:
        """The exit code, of a signal its negative number; None while it runs."""
        return int(self._code.read_text()) if self._code.exists() else None

    @property
    def output(self) -> str:
        """What it has written to standard output and standard error."""
        return self._output.read_text()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.code is None:
            os.kill(self.pid, number)

    async def end(self) -> tuple[int, str]:
        """Wait until it has ended; its exit code and output."""
        async with asyncio.timeout(PATIENCE_S):
            while (code := self.code) is None:
                await asyncio.sleep(0.02)
        return code, self.output


class Forks:
    """The process that runs `forked.py`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Forked] = []
        self._process = subprocess.Popen(
            [sys.executable, str(FORKED)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """Do what `python ARGUMENTS` does: run a script, or with `-m` a module."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        name = str(len(self._started))
        output, code = self._folder / f"{name}.txt", self._folder / f"{name}.code"
        command = {
            "arguments": list(arguments),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **environment},
            "output": str(output),
            "code": str(code),
        }
        print(json.dumps(command), file=self._process.stdin, flush=True)
        output.touch()
        self._started.append(Forked(int(self._process.stdout.readline()), output, code))
        return self._started[-1]

    def start_ranks(
        self, world: int, what: str, folder: Path, where: Mapping[str, str] | None = None
    ) -> list[Forked]:
        """Start `ranks.py` as so many ranks, with the environment that torchrun would set."""
        shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= place_of(world) if where is None else where
        return [
            self.start(
                [str(WORKER), what, str(folder)],
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]

    def close(self) -> None:
        """End what a failed test has left, and the process."""
        for forked in self._started:
            forked.send(signal.SIGKILL)
        self._process.communicate(timeout=PATIENCE_S)


def join(ranks: list[Forked]) -> None:
    """Wait until all have ended; when one fails, the others are killed."""
    deadline = time.monotonic() + PATIENCE_S
    try:
        while any(rank.code is None for rank in ranks):
            assert time.monotonic() < deadline, "ranks hang"
            assert not any(rank.code for rank in ranks)
            time.sleep(0.02)
        assert not any(rank.code for rank in ranks)
    except AssertionError as error:
        for rank in ranks:
            rank.send(signal.SIGKILL)
        outputs = "\n".join(rank.output[-3000:] for rank in ranks)
        raise AssertionError(outputs) from error


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts Python programs that do not import anew what trainers import."""
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture
def join_ranks() -> Callable[[list[Forked]], None]:
    """Wait until all ranks have ended, and well."""
    return join


@pytest.fixture
def run_ranks(forks: Forks) -> Callable[[int, str, Path], None]:
    """Run `ranks.py` as so many ranks."""
    return lambda world, what, folder: join(forks.start_ranks(world, what, folder))


@pytest.fixture
def stage() -> Callable[[WeightCopy], Staging]:
    """Stage a copy of the weights, as those that are served."""
    return staged


@pytest.fixture
def scores_of() -> Callable[[Any, Canary], list[list[float]]]:
    """What an engine returns for a canary: log-probs of a Hugging Face model."""
    return _scores_of


@torch.no_grad()
def _scores_of(model: Any, canary: Canary) -> list[list[float]]:
    found: list[list[float]] = []
    for each in canary.sequences:
        tokens = torch.tensor(each.tokens)
        logprobs = torch.log_softmax(model(tokens[None, :-1]).logits[0].float(), -1)
        found.append(logprobs.gather(-1, tokens[1:, None])[:, 0].tolist())
    return found


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
        self.refused: set[int] = set()  # versions that no engine accepts
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
        if len(self.versions) - 1 in self.refused:
            yield pb.BatchPart(step=request.step, publish_again=True)
            return
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
        "rollout": {"engine": "simulated"},  # whose log-probs are made up as well
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
