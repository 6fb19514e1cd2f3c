"""The tracking service: runs a feed for each tracker of each job."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from paceline.config import job_of
from paceline.config.load import validate
from paceline.config.service import TrackingOptions
from paceline.config.tracking import TrackingSpec
from paceline.enums import TrackerState, WorkerKind
from paceline.errors import ConfigError, PacelineError
from paceline.isolation.code.tokenizers.jobs import tokenizers_of
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.server.membership import Membership
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import GaugeSet, Metrics, series
from paceline.platform.transport.rpc import connect_as
from paceline.plugins import TrackedRun
from paceline.types import Job, Worker
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline_tracking.child import TrackerProcess
from paceline_tracking.history import GrpcHistoryReader, HistoryReader
from paceline_tracking.sync import Start, TrackerSync, status_of

log = Log("tracking")
# Part of the grace period that is reserved for shutdown after the feeds.
END_S = 2.0
# Period of listing all jobs: a short one may start and end between two polls of live jobs.
ALL_S = 60.0
# Concurrent processes for finished jobs: there may be thousands when tracking is enabled.
MOST_LATE = 4
MISSED = "the job had been over for too long when trackers were looked for"


class TrackerSyncs:
    """All feeds of this process, by job and tracker."""

    def __init__(
        self,
        *,
        ledger: HistoryReader,
        options: TrackingOptions,
        metrics: Metrics,
        run_dir: Path,
        start: Start = TrackerProcess.start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._options = options
        self._metrics = metrics
        self._run_dir = run_dir
        self._start = start
        self._clock = clock
        self._late = asyncio.Semaphore(MOST_LATE)
        self._lags = GaugeSet(metrics)  # by kind
        self._seen: set[str] = set()  # jobs, by id: specs do not change
        self._feeds: dict[tuple[str, str], TrackerSync] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Poll for jobs until cancelled; every `ALL_S` and after errors, for finished ones too."""
        all_s: float | None = None  # when all jobs were last listed
        while True:
            now_s = self._clock()
            live = all_s is not None and now_s - all_s < ALL_S
            try:
                await self.look(live=live)
                all_s = all_s if live else now_s
            except PacelineError as error:
                log.warning("cannot list jobs; going on with those known", error=error)
                all_s = None
            await self._tend()
            await asyncio.sleep(self._options.poll_s)

    async def look(self, *, live: bool) -> None:
        """Start feeds for new jobs."""
        for job in await self._ledger.jobs(live=live):
            if job.status.job_id not in self._seen:
                if job.status.tracking:  # listed jobs have no spec
                    await self._follow(await self._ledger.job(job.status.job_id))
                self._seen.add(job.status.job_id)

    async def drain(self, *, within_s: float) -> None:
        """Hand over available rows; the rest follows after the next start."""
        for feed in self._feeds.values():
            feed.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=within_s)
        await self.close()

    async def close(self) -> None:
        """End all processes."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def load(self) -> dict[str, float]:
        """Number of active feeds."""
        return {"trackers": float(len(self._tasks))}

    async def _follow(self, job: Job) -> None:
        try:
            spec = job_of(job)
        except ConfigError as error:  # of another release
            log.warning("job not tracked", job=job.status.job_id, error=error)
            return
        for tracker in spec.tracking:
            status = status_of(job.status, tracker)
            if status.state.terminal:
                continue
            if self._missed(job):
                missed = replace(status, state=TrackerState.FAILED, detail=MISSED)
                await self._ledger.report(job.status.job_id, missed)
                continue
            key = (job.status.job_id, tracker.label)
            self._feeds[key] = self._feed(job, tracker)
            self._begin(key)

    def _missed(self, job: Job) -> bool:
        """Whether the job ended too long ago to start tracking it."""
        status = job.status
        over_s = status.age_s - status.runtime_s  # upper bound: it may have been queued
        begun = any(told.state != TrackerState.WAITING for told in status.tracking)
        return status.state.terminal and not begun and over_s > self._options.give_up_s

    def _feed(self, job: Job, tracker: TrackingSpec) -> TrackerSync:
        shared = self._run_dir / "tracking" / tracker.kind
        folder = self._run_dir / "jobs" / job.status.job_id / "tracking" / tracker.label
        folder.mkdir(parents=True, exist_ok=True)
        run = TrackedRun(
            run_id=job.status.job_id,
            name=job.status.name,
            tenant=job.status.tenant,
            axis=tracker.axis,
            folder=folder,
            shared_folder=shared,
            config=json.loads(job.spec),
        )
        return TrackerSync(
            job=job,
            spec=tracker,
            run=run,
            ledger=self._ledger,
            options=self._options,
            metrics=self._metrics,
            start=self._start,
            turn=self._late if job.status.state.terminal else nullcontext(),
            clock=self._clock,
        )

    def _begin(self, key: tuple[str, str]) -> None:
        self._tasks[key] = asyncio.create_task(self._feeds[key].run(), name="feed")

    async def _tend(self) -> None:
        """Remove finished feeds, restart failed ones, and export the lag of all."""
        for key, task in list(self._tasks.items()):
            if not task.done():
                continue
            if not task.cancelled() and (error := task.exception()) is not None:
                log.exception("feed broke; begins again", of=error, job=key[0], tracker=key[1])
                self._begin(key)
            else:
                del self._tasks[key], self._feeds[key]
                if all(job_id != key[0] for job_id, _ in self._feeds):
                    await self._ledger.forget(key[0])
        self._tell_lag()

    def _tell_lag(self) -> None:
        now_s = self._clock()
        lags: dict[str, float] = {}
        for feed in self._feeds.values():
            kind = feed.status.kind
            lags[kind] = max(lags.get(kind, 0.0), now_s - feed.caught_up_s)
        self._lags.show({series("tracking_lag", tracker=kind): lags[kind] for kind in lags})


class TrackingService(Service):
    """Tracks all jobs with trackers; a client of the experience service, unknown to it."""

    def __init__(self, chassis: Chassis, options: TrackingOptions) -> None:
        settings = chassis.settings
        self._chassis = chassis
        self._channel = connect_as(settings, settings.experience)
        roster = RosterStub(self._channel)
        self._tokenizers = tokenizers_of(settings.tokenizers)
        self._feeds = TrackerSyncs(
            ledger=GrpcHistoryReader(
                jobs=JobsStub(self._channel),
                experience=ExperienceStub(self._channel),
                roster=roster,
                tokenizers=self._tokenizers,
            ),
            options=options,
            metrics=chassis.metrics,
            run_dir=settings.run_dir.resolve(),
        )
        self._membership = Membership(roster=roster, report=self.report, usage=chassis.usage.totals)

    async def run(self) -> None:
        """Follow jobs until the service stops."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run(), name="membership")
            tasks.create_task(self._feeds.run(), name="feeds")

    async def drain(self) -> None:
        """Hand over available rows."""
        await self._feeds.drain(within_s=max(self._chassis.settings.grace_s - END_S, 0.0))
        await self._membership.leave()

    async def close(self) -> None:
        """End all processes."""
        await self._feeds.close()
        await self._tokenizers.close()
        await self._channel.close()

    def report(self) -> Worker:
        """This process for the roster."""
        settings = self._chassis.settings
        return Worker(
            worker_id=settings.worker_id,
            kind=WorkerKind.TRACKING,
            endpoint=self._chassis.address,
            site=settings.site,
            load=self._feeds.load() | {"cpu_s": time.process_time()},
            pid=os.getpid(),
        )


async def build(chassis: Chassis) -> Service:
    """What the chassis runs."""
    if not chassis.settings.experience:
        raise ConfigError("experience: host:port of the experience service is needed")
    return TrackingService(chassis, validate(TrackingOptions, chassis.settings.options))
