"""An in-memory history, and feeds of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from paceline.config.service import TrackingOptions
from paceline.config.tracking import TrackingSpec
from paceline.enums import JobState, Purpose
from paceline.errors import NotFoundError, UnavailableError
from paceline.isolation.code.tokenizers.jobs import JobTokenizer
from paceline.platform.progress import LedgerProgress
from paceline.platform.telemetry.metrics import Metrics
from paceline.testing.trackers import tracked_run
from paceline.types import Job, JobStatus, TrackerStatus, Trajectory, Worker
from paceline_tracking.child import TrackerProcess
from paceline_tracking.history import TrackedRow
from paceline_tracking.sync import TrackerSync

KIND = "lines"


@dataclass
class History:
    """An in-memory experience service, unreachable while `away`."""

    total: int = 0
    over: bool = False
    away: bool = False
    refused: int = 0
    told: list[TrackerStatus] = field(default_factory=list[TrackerStatus])

    async def jobs(self, *, live: bool) -> list[Job]:
        return [await self.job("j")]

    async def job(self, job_id: str) -> Job:
        self._answers()
        state = JobState.SUCCEEDED if self.over else JobState.RUNNING
        tracking = tuple(self.told[-1:])
        status = JobStatus(job_id="j", name="j", tenant="t", state=state, tracking=tracking)
        return Job(status=replace(status, summary={"steps": self.total}), spec="{}")

    async def rows(self, job_id: str, *, after: int) -> Sequence[TrackedRow]:
        self._answers()
        last = min(self.total, after + 4)
        return [
            TrackedRow(i, i + 1, Purpose.TRAIN, {"loss": 1.0, "version": i})
            for i in range(after, last)
        ]

    async def live(self, job_id: str) -> LedgerProgress | None:
        self._answers()
        return None

    async def workers(self, job_id: str) -> Sequence[Worker]:
        return []

    async def trajectories(self, job_id: str, count: int) -> Sequence[Trajectory]:
        raise NotFoundError("none are kept")

    async def tokenizer(self, job: Job) -> JobTokenizer:
        raise NotFoundError("none is kept")

    async def forget(self, job_id: str) -> None:
        pass

    async def report(self, job_id: str, tracker: TrackerStatus) -> None:
        self._answers()
        self.told.append(tracker)

    def _answers(self) -> None:
        if self.away:
            self.refused += 1
            raise UnavailableError("away")


@dataclass
class Bench:
    """A feed of the tracker `lines`, whose failure mode is in a file."""

    folder: Path
    history: History = field(default_factory=History)
    metrics: Metrics = field(default_factory=Metrics)
    timeout_s: float = 60.0
    tells: bool = True

    @property
    def trouble(self) -> Path:
        return self.folder / "trouble"

    async def feed(self, start: Callable[[], Any] = TrackerProcess.start) -> TrackerSync:
        options: dict[str, Any] = {"trouble": str(self.trouble), "tells": self.tells}
        spec = TrackingSpec.model_construct(
            kind=KIND, name="lines", axis="step", system_s=None, samples=None,
            timeout_s=self.timeout_s, **options,
        )  # fmt: skip
        return TrackerSync(
            job=await self.history.job("j"),
            spec=spec,
            run=tracked_run(self.folder),
            ledger=self.history,
            options=TrackingOptions(poll_s=0.02, retry_most_s=0.05),
            metrics=self.metrics,
            start=start,
        )

    def rows(self) -> list[int]:
        path = self.folder / "run" / "points.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["index"] for line in lines]

    def exposed(self) -> str:
        return generate_latest(self.metrics.registry).decode()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def make_bench() -> Callable[..., Bench]:
    return Bench
