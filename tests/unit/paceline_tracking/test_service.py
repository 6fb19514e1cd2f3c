"""Which jobs are followed, how many of them at a time, and what is told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from paceline.config.service import TrackingOptions
from paceline.enums import JobState, Purpose, TrackerState
from paceline.errors import NotFoundError, UnavailableError
from paceline.isolation.code.tokenizers.jobs import JobTokenizer
from paceline.platform.progress import LedgerProgress
from paceline.platform.telemetry.metrics import Metrics
from paceline.types import Job, JobStatus, TrackerStatus, Trajectory, Worker
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import FakeClock
from paceline_tracking.history import ROWS, TrackedRow
from paceline_tracking.service import ALL_S, MISSED, MOST_LATE, TrackerSyncs

SPEC = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
    "tracking": [{"kind": "tensorboard", "system_s": None, "samples": None}],
}


@dataclass
class Jobs:
    """The ledger of some jobs in memory."""

    found: dict[str, JobStatus] = field(default_factory=dict[str, JobStatus])
    rows_each: int = 0
    away: bool = False
    looks: list[bool] = field(default_factory=list[bool])
    told: dict[str, TrackerStatus] = field(default_factory=dict[str, TrackerStatus])

    def add(self, job_id: str, state: JobState = JobState.SUCCEEDED, **changes: Any) -> None:
        waiting = TrackerStatus("tensorboard", "tensorboard", TrackerState.WAITING)
        changes.setdefault("tracking", (waiting,))
        self.found[job_id] = JobStatus(job_id, job_id, "t", state, **changes)

    def states(self) -> list[str]:
        return [self.told[name].state if name in self.told else "" for name in self.found]

    async def jobs(self, *, live: bool) -> list[Job]:
        self.looks.append(live)
        if self.away:
            raise UnavailableError("away")
        wanted = [each for each in self.found.values() if not (live and each.state.terminal)]
        return [Job(status, "") for status in wanted]

    async def job(self, job_id: str) -> Job:
        specs = {"foreign": {"name": "a", "unheard": 1}}
        return Job(self.found[job_id], json.dumps(specs.get(job_id, SPEC)))

    async def rows(self, job_id: str, *, after: int) -> Sequence[TrackedRow]:
        last = min(after + ROWS, self.rows_each)
        return [
            TrackedRow(index, index, Purpose.TRAIN, {"loss": 1.0}) for index in range(after, last)
        ]

    async def live(self, job_id: str) -> LedgerProgress | None:
        return None

    async def workers(self, job_id: str) -> Sequence[Worker]:
        return []

    async def trajectories(self, job_id: str, count: int) -> Sequence[Trajectory]:
        return []

    async def tokenizer(self, job: Job) -> JobTokenizer:
        raise NotFoundError("none is kept")

    async def forget(self, job_id: str) -> None:
        pass

    async def report(self, job_id: str, tracker: TrackerStatus) -> None:
        self.told[job_id] = tracker


@dataclass
class Children:
    """Trackers without processes; with `gate` closed they do not answer."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    alive: int = 0
    most: int = 0
    writes: int = 0

    async def start(self) -> Any:
        self.alive += 1
        self.most = max(self.most, self.alive)
        return self

    async def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        await self.gate.wait()
        self.writes += "write" in request
        return {"url": "", "rows": None}

    async def kill(self) -> None:
        self.alive -= 1


class World:
    def __init__(self, folder: Path) -> None:
        self.jobs, self.children = Jobs(), Children()
        self.clock, self.metrics = FakeClock(), Metrics()
        self.options = TrackingOptions(poll_s=0.01, give_up_s=1000.0)
        self.feeds = TrackerSyncs(
            ledger=self.jobs,
            options=self.options,
            metrics=self.metrics,
            run_dir=folder,
            start=self.children.start,
            clock=self.clock,
        )

    @property
    def lag(self) -> float | None:
        """As Prometheus sees it."""
        for line in generate_latest(self.metrics.registry).decode().splitlines():
            if line.startswith("paceline_tracking_lag_seconds{"):
                return float(line.split()[-1])
        return None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self.feeds.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.feeds.close()

    async def looked(self, times: int = 3) -> None:
        """So many looks later."""
        seen = len(self.jobs.looks)
        await until(lambda: len(self.jobs.looks) >= seen + times)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not done():
            await asyncio.sleep(0.005)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_job_that_ran_between_two_polls_is_tracked(world: World) -> None:
    world.children.gate.set()
    async with world.running():
        await world.looked()
        world.jobs.add("short")
        await world.looked()
        assert world.jobs.states() == [""]
        world.clock.pass_s(ALL_S)
        await until(lambda: world.jobs.states() == ["done"])
    assert world.jobs.looks.count(False) == 2


async def test_a_job_that_came_and_went_in_an_outage_is_tracked(world: World) -> None:
    world.children.gate.set()
    async with world.running():
        await world.looked()
        world.jobs.away = True
        await world.looked()
        world.jobs.add("short")
        world.jobs.away = False
        await until(lambda: world.jobs.states() == ["done"])


async def test_old_jobs_take_turns_and_hold_up_no_other(world: World) -> None:
    for number in range(3 * MOST_LATE):
        world.jobs.add(f"old-{number}")
    async with world.running():
        await until(lambda: world.children.alive == MOST_LATE)
        await world.looked()
        assert world.children.alive == MOST_LATE
        world.jobs.add("new", JobState.RUNNING)
        await until(lambda: world.children.alive == MOST_LATE + 1)
        world.children.gate.set()
        await until(lambda: world.jobs.states().count("done") == 3 * MOST_LATE)
        assert world.children.most == MOST_LATE + 1


async def test_while_stopping_no_old_job_is_started(world: World) -> None:
    for number in range(3 * MOST_LATE):
        world.jobs.add(f"old-{number}")
    async with world.running():
        await until(lambda: world.children.alive == MOST_LATE)
        draining = asyncio.create_task(world.feeds.drain(within_s=PATIENCE_S))
        await asyncio.sleep(0)
        world.children.gate.set()
        await asyncio.wait_for(draining, PATIENCE_S)
    assert world.jobs.states().count("") == 2 * MOST_LATE


async def test_a_job_that_ended_long_ago_is_not_tracked(world: World) -> None:
    world.children.gate.set()
    world.jobs.add("ancient", age_s=3000.0, runtime_s=1000.0)
    world.jobs.add("long", age_s=3000.0, runtime_s=2500.0)
    begun = TrackerStatus(name="tensorboard", kind="tensorboard", state=TrackerState.RETRYING)
    world.jobs.add("begun", age_s=3000.0, runtime_s=1000.0, tracking=(begun,))
    async with world.running():
        await until(lambda: world.jobs.states() == ["failed", "done", "done"])
    assert world.jobs.told["ancient"].detail == MISSED


async def test_a_job_that_cannot_be_read_hides_no_other(world: World) -> None:
    world.children.gate.set()
    world.jobs.add("foreign")
    world.jobs.add("good")
    async with world.running():
        await until(lambda: world.jobs.states() == ["", "done"])
        assert world.jobs.looks.count(False) == 1


async def test_an_unused_tracker_does_not_lag(world: World) -> None:
    world.jobs.add("a", JobState.RUNNING)
    async with world.running():
        await until(lambda: world.lag == 0.0)
        world.clock.pass_s(700.0)
        await until(lambda: world.lag == 700.0)
        world.jobs.add("a")
        world.children.gate.set()
        await until(lambda: world.jobs.states() == ["done"])
        await until(lambda: world.lag is None)


async def test_an_up_to_date_tracker_does_not_lag(world: World) -> None:
    """Though there is something new whenever it is asked."""
    world.jobs.add("a", JobState.RUNNING)
    world.children.gate.set()

    async def rows(job_id: str, *, after: int) -> Sequence[TrackedRow]:
        await asyncio.sleep(0.001)
        return [TrackedRow(after, after, Purpose.TRAIN, {"loss": 1.0})]

    world.jobs.rows = rows
    async with world.running():
        await until(lambda: world.lag == 0.0)
        world.clock.pass_s(700.0)
        await world.looked()
        await until(lambda: world.lag == 0.0)
        assert world.children.writes
