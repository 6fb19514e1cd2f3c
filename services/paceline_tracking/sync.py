"""Feeds one tracker of one job: each row once, in order, despite failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from paceline.config.service import TrackingOptions
from paceline.config.tracking import TrackingSpec
from paceline.enums import TrackerState
from paceline.errors import NotFoundError, PacelineError
from paceline.platform.server.restarts import RestartBackoff
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.plugins import TrackedPoint, TrackedRun
from paceline.types import Job, JobStatus, TrackerStatus
from paceline_tracking.child import TrackerError, TrackerProcess
from paceline_tracking.history import ROWS, HistoryReader, TrackedRow
from paceline_tracking.messages import point_to, run_to
from paceline_tracking.points import point_of
from paceline_tracking.samples import Samples
from paceline_tracking.system import System

log = Log("feed")
Start = Callable[[], Awaitable[TrackerProcess]]


class TrackerSync:
    """Reads the history from the tracker's position on, and passes it to the tracker.

    Nothing waits for a feed: it reads the ledger like any client. Its only durable state is
    `status`, which the ledger stores.
    """

    def __init__(
        self,
        *,
        job: Job,
        spec: TrackingSpec,
        run: TrackedRun,
        ledger: HistoryReader,
        options: TrackingOptions,
        metrics: Metrics,
        start: Start = TrackerProcess.start,
        turn: AbstractAsyncContextManager[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job_id = job.status.job_id
        self._spec = spec
        self._run = run
        self._ledger = ledger
        self._options = options
        self._metrics = metrics
        self._start = start
        self._turn = turn or nullcontext()  # held while there is a process, not during backoff
        self._clock = clock
        self._samples = Samples(ledger=ledger, job=job, spec=spec.samples)
        self._restarts = RestartBackoff(max_s=options.retry_most_s)
        self._over_s: float | None = None  # when the job was first found to be over
        self._version = -1
        self._stopping = asyncio.Event()
        self.status = status_of(job.status, spec)
        self.caught_up_s = clock()

    @property
    def ended(self) -> bool:
        """Whether the tracker is done or has failed for good."""
        return self.status.state.terminal

    def stop(self) -> None:
        """Stop once all available rows have been handed over."""
        self._stopping.set()

    async def run(self) -> None:
        """Run until the tracker has everything, `stop` is called, or the job is unknown."""
        period_s = self._spec.system_s
        system = System(ledger=self._ledger, job_id=self._job_id, period_s=period_s or 1.0)
        watch = asyncio.create_task(system.run(), name="system") if period_s else None
        try:
            while not self.ended and not self._stopping.is_set():
                await self._live(system)
        except NotFoundError:
            log.info("job is gone", job=self._job_id, tracker=self.status.name)
        finally:
            if watch is not None:
                watch.cancel()

    async def _live(self, system: System) -> None:
        """Run the tracker process once, and back off if it fails."""
        async with self._turn:
            if not self._stopping.is_set():
                await self._process(system)
        if self.status.state == TrackerState.RETRYING:
            await self._pause(self._restarts.due_s - self._clock())

    async def _process(self, system: System) -> None:
        child: TrackerProcess | None = None
        try:
            child = await self._start()
            await self._open(child)
            await self._follow(child, system)
        except TrackerError as error:
            await self._failed(error)
        finally:
            if child is not None:
                await child.kill()

    async def _open(self, child: TrackerProcess) -> None:
        request = {
            "kind": self._spec.kind,
            "options": self._spec.options,
            "run": run_to(self._run),
        }
        answer = await child.ask({"open": request}, timeout_s=self._spec.timeout_s)
        rows = self.status.rows if answer["rows"] is None else int(answer["rows"])
        await self._tell(rows=rows, url=answer["url"])

    async def _follow(self, child: TrackerProcess, system: System) -> None:
        while True:
            points, over = await self._next(system)
            if points:
                await self._write(child, points)
            elif over is not None:
                await self._finish(child, over)
                return
            elif self._stopping.is_set():
                await child.ask({"close": {}}, timeout_s=self._spec.timeout_s)
                return
            else:
                await self._works()
                self.caught_up_s = self._clock()
                await self._pause(self._options.poll_s)

    async def _next(self, system: System) -> tuple[list[TrackedPoint], JobStatus | None]:
        """Rows to write, and the job's final status if there will be no more."""
        while True:
            try:
                # In this order: the last row of a job is written before its end.
                now = (await self._ledger.job(self._job_id)).status
                rows = await self._ledger.rows(self._job_id, after=self.status.rows)
                break
            except NotFoundError:
                raise
            except PacelineError as error:
                log.warning("history not read", job=self._job_id, error=error)
                await asyncio.sleep(self._options.poll_s)
        return [*await self._points(rows), *system.take()], now if now.state.terminal else None

    async def _points(self, rows: Sequence[TrackedRow]) -> list[TrackedPoint]:
        for row in rows:
            self._samples.note(row)
        sampled, samples = await self._samples.of(rows)
        points: list[TrackedPoint] = []
        for row in rows:
            points.append(
                point_of(
                    row, version=self._version, samples=samples if row.index == sampled else ()
                )
            )
            self._version = max(self._version, points[-1].version)
        return points

    async def _write(self, child: TrackerProcess, points: Sequence[TrackedPoint]) -> None:
        request = {"write": [point_to(point) for point in points]}
        answer = await child.ask(request, timeout_s=self._spec.timeout_s)
        rows = [point.index + 1 for point in points if point.index >= 0]
        self._metrics.add("tracking_rows", len(rows), tracker=self._spec.kind)
        await self._works(rows=max(rows, default=self.status.rows), url=answer["url"])
        if len(rows) < ROWS:  # there was no more
            self.caught_up_s = self._clock()

    async def _works(self, **changes: Any) -> None:
        """Record the end of an outage, if there was one."""
        if self.status.state == TrackerState.RETRYING:
            log.info("tracker works again", job=self._job_id, tracker=self.status.name)
        self._restarts = RestartBackoff(max_s=self._options.retry_most_s)
        await self._tell(state=TrackerState.FOLLOWING, detail="", **changes)

    async def _finish(self, child: TrackerProcess, over: JobStatus) -> None:
        request = {"finish": {"state": over.state, "summary": over.summary}}
        answer = await child.ask(request, timeout_s=self._spec.timeout_s)
        await self._tell(state=TrackerState.DONE, detail="", url=answer["url"])
        log.info("tracked", job=self._job_id, tracker=self.status.name, rows=self.status.rows)

    async def _failed(self, error: TrackerError) -> None:
        """Log one warning per outage, however many retries it takes."""
        self._metrics.add("tracking_errors", tracker=self._spec.kind, reason=error.reason)
        self._restarts.failed(self._clock(), lived_s=0.0)
        if self.status.state != TrackerState.RETRYING:
            log.warning(
                "tracker failed; will be tried again",
                job=self._job_id,
                tracker=self.status.name,
                reason=error.reason,
                detail=error.detail,
            )
        hopeless = await self._hopeless()
        state = TrackerState.FAILED if hopeless else TrackerState.RETRYING
        await self._tell(state=state, detail=f"{error.reason}: {error.detail}")

    async def _hopeless(self) -> bool:
        """Whether the job has been over for too long to keep trying."""
        try:
            over = (await self._ledger.job(self._job_id)).status.state.terminal
        except NotFoundError:
            raise
        except PacelineError:
            return False
        if not over:
            return False
        self._over_s = self._clock() if self._over_s is None else self._over_s
        return self._clock() - self._over_s > self._options.give_up_s

    async def _tell(self, **changes: Any) -> None:
        """Change the status here and in the ledger; if that fails, the next change carries it."""
        changed = replace(self.status, **changes)
        if changed == self.status:
            return
        self.status = changed
        try:
            await self._ledger.report(self._job_id, changed)
        except NotFoundError:
            raise
        except PacelineError as error:
            log.warning("status not told", job=self._job_id, error=error)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._stopping.wait()


def status_of(job: JobStatus, spec: TrackingSpec) -> TrackerStatus:
    """The status of a tracker as stored in the ledger."""
    for told in job.tracking:
        if told.name == spec.label and told.state != TrackerState.WAITING:
            return told
    return TrackerStatus(name=spec.label, kind=spec.kind, state=TrackerState.FOLLOWING)
