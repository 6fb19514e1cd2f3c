"""Runs a job on simulated engines through the services, and measures it between two steps."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict
from tokenizers import Tokenizer, models, pre_tokenizers

from generation.cluster import Cluster, cluster
from generation.trainer import INCARNATION, SimulatedTrainer, TrainedStep
from paceline.enums import JobState, WorkerKind
from paceline.platform import wire
from paceline.platform.transport.rpc import call, connect
from paceline.v1 import environment_pb2, jobs_pb2, rollout_pb2
from paceline.v1 import experience_pb2 as pb
from paceline.v1.environment_pb2_grpc import EnvironmentStub
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.rollout_pb2_grpc import RolloutStub

if TYPE_CHECKING:
    from paceline.v1.environment_pb2_grpc import EnvironmentAsyncStub
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.rollout_pb2_grpc import RolloutAsyncStub

VOCAB = ("<pad>", "</s>", *"0123456789+=- q\n")
READY_S = 120.0
POLL_S = 0.1
RUN_S = 600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A job, the workers that serve it, and the steps that are measured."""

    job: dict[str, Any]
    workers: int  # rollout workers
    environments: int  # slots of the environment worker
    train_s: float
    steps: int
    first: int  # steps before the measurement begins


@dataclass(slots=True)
class Measured:
    """What happened between the commits of two steps."""

    steps: list[TrainedStep]
    seconds: float = 0.0
    tokens: int = 0  # generated
    busy_s: float = 0.0  # with any request, summed over rollout workers
    open_share: float = 0.0  # of the environment worker's slots: episodes that are open
    cpu_s: float = 0.0  # of all services and this process
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    report: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class _Counters:
    at_s: float
    tokens: int
    busy_s: float
    cpu_s: float


def measure(setting: Setting) -> Measured:
    """Run a job on a fresh installation."""
    with cluster() as processes:
        return asyncio.run(_Run(processes, setting).run())


class _Run:
    def __init__(self, processes: Cluster, setting: Setting) -> None:
        self._processes = processes
        self._setting = setting
        self._rollouts: list[RolloutAsyncStub] = []
        self._marks: list[_Counters] = []
        self._open: list[float] = []
        self._marking: list[asyncio.Task[None]] = []

    async def run(self) -> Measured:
        setting, address = self._setting, self._processes.experience
        async with connect(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), READY_S)
            experience: ExperienceAsyncStub = ExperienceStub(channel)
            jobs: JobsAsyncStub = JobsStub(channel)
            job_id = await self._submit(jobs, experience)
            credential = await self._credential(
                experience, job_id, WorkerKind.TRAINER, f"trainer-{job_id}", INCARNATION
            )
            trainer = SimulatedTrainer(address, credential, job_id, setting.train_s)
            watching = asyncio.create_task(self._watch(await self._start(experience, job_id)))
            try:
                async with asyncio.timeout(RUN_S):
                    await trainer.run(setting.steps, on_step=self._on_step)
                    await asyncio.gather(*self._marking)
            finally:
                watching.cancel()
            measured = self._measured(trainer.steps)
            measured.rows, measured.report = await _history(jobs, job_id)
            return measured

    async def _submit(self, jobs: JobsAsyncStub, experience: ExperienceAsyncStub) -> str:
        request = jobs_pb2.SubmitJobRequest(spec_json=json.dumps(self._setting.job), files=_files())
        job_id = (await call(jobs.SubmitJob, request, timeout_s=READY_S)).status.job_id
        state = wire.number_of(JobState.STARTING)
        starting = pb.SetJobStateRequest(job_id=job_id, state=state)
        await call(experience.SetJobState, starting, timeout_s=READY_S)
        grant = pb.GrantIncarnationRequest(job_id=job_id)
        await call(experience.GrantIncarnation, grant, timeout_s=READY_S)
        return job_id

    async def _credential(
        self,
        experience: ExperienceAsyncStub,
        job_id: str,
        kind: WorkerKind,
        worker: str,
        incarnation: int = 0,
    ) -> str:
        request = pb.IssueCredentialRequest(
            job_id=job_id, kind=wire.number_of(kind), worker=worker, incarnation=incarnation
        )
        return (await call(experience.IssueCredential, request, timeout_s=READY_S)).credential

    async def _start(self, experience: ExperienceAsyncStub, job_id: str) -> str:
        """Start the workers; returns the address of the environment worker."""
        setting, processes = self._setting, self._processes
        addresses: list[str] = []
        for number in range(setting.workers):
            text = await self._credential(
                experience, job_id, WorkerKind.ROLLOUT, f"rollout-{number}"
            )
            path = processes.write(f"rollout-{number}.credential", text)
            addresses.append(processes.start("rollout", number, job_id=job_id, credential=path))
        processes.start("reward", 0, options={"processes": 1})
        where = processes.start("environment", 0, options={"slots": setting.environments})
        for address in (*addresses, where):
            await self._until_ready(address)
        self._rollouts = [RolloutStub(connect(address)) for address in addresses]
        return where

    async def _until_ready(self, address: str) -> None:
        channel = connect(address)
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    self._processes.check()
                    try:
                        await asyncio.wait_for(channel.channel_ready(), 1.0)
                        return
                    except TimeoutError:
                        continue
        finally:
            await channel.close()

    def _on_step(self, done: int) -> None:
        if done in (self._setting.first, self._setting.steps):
            self._marking.append(asyncio.create_task(self._mark()))

    async def _mark(self) -> None:
        at_s, found = time.monotonic(), list[rollout_pb2.RolloutStatus]()
        for rollout in self._rollouts:
            request = rollout_pb2.RolloutStatusRequest()
            found.append(await call(rollout.Status, request, timeout_s=READY_S))
        self._marks.append(
            _Counters(
                at_s,
                sum(each.tokens_generated for each in found),
                sum(each.busy_s for each in found),
                self._processes.cpu_s() + time.process_time(),
            )
        )

    async def _watch(self, address: str) -> None:
        """Sample the open episodes between the two marks."""
        async with connect(address) as channel:
            stub: EnvironmentAsyncStub = EnvironmentStub(channel)
            while True:
                await asyncio.sleep(POLL_S)
                self._processes.check()
                request = environment_pb2.EnvironmentStatusRequest()
                status = await call(stub.Status, request, timeout_s=READY_S)
                if len(self._marks) == 1:
                    self._open.append(status.open_episodes / status.slots)

    def _measured(self, steps: list[TrainedStep]) -> Measured:
        first, last = self._marks
        return Measured(
            steps=steps[self._setting.first :],
            seconds=steps[-1].committed_s - steps[self._setting.first - 1].committed_s,
            tokens=last.tokens - first.tokens,
            busy_s=last.busy_s - first.busy_s,
            open_share=statistics.fmean(self._open),
            cpu_s=last.cpu_s - first.cpu_s,
        )


async def _history(jobs: JobsAsyncStub, job_id: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of steps by step, and the audit."""
    reply = await call(jobs.ListMetrics, jobs_pb2.ListMetricsRequest(job_id=job_id, page_size=500))
    report = await call(jobs.VerifyJob, jobs_pb2.VerifyJobRequest(job_id=job_id))
    if not report.ok:
        raise SystemExit(f"the ledger is inconsistent: {list(report.problems)}")
    rows = [MessageToDict(row.values) for row in reply.rows]
    return rows, {"counts": dict(report.counts), "dropped": dict(report.dropped)}


def _files() -> dict[str, bytes]:
    """A character tokenizer."""
    fast = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCAB)}, unk_token=" "))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "tokenizer.json": fast.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "</s>"}).encode(),
        "config.json": json.dumps({"vocab_size": len(VOCAB)}).encode(),
    }
