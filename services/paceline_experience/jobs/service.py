"""What users and the controller ask of jobs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.config import JobSpec, job_of
from paceline.enums import EXPLAINED, JobState, check_job_transition
from paceline.errors import (
    InvalidError,
    NotFoundError,
    StoreError,
    UnavailableError,
)
from paceline.platform.files import write_json
from paceline.platform.progress import LedgerProgress
from paceline.platform.telemetry.logs import Log
from paceline.types import Job, JobStatus, TrackerStatus
from paceline_experience.fleet.roster import wait
from paceline_experience.fleet.routes import RoutePlanner
from paceline_experience.jobs.export import Exporter
from paceline_experience.jobs.history import History, JobMetricRow, summarise
from paceline_experience.jobs.hooks import start
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.jobs.pausing import Pausing
from paceline_experience.jobs.submit.pipeline import JobSubmitter
from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.ledger.replay.imports import (
    MAX_IMPORT_CHARS,
    ImportReport,
    lines_of,
    vocabulary_of,
)
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.tenancy.quotas import Quotas

log = Log("jobs")
_ROWS = 1000
_MAX_ROWS = 2**53 - 1
_WATCH_S = 1.0
_ENDED_S = 60.0
_MIN_EVENT_INTERVAL_S = 0.1
_WRITE_TIMEOUT_S = 60.0  # how long the end of a job waits for a disk that refuses its files


@dataclass(frozen=True, slots=True)
class Event:
    """One event of `JobService.watch`."""

    status: JobStatus
    rows: list[JobMetricRow]
    live: LedgerProgress | None  # None: the job has no open ledger


class JobService:
    """Submits, watches, moves and concludes jobs."""

    def __init__(
        self,
        *,
        submitter: JobSubmitter,
        pausing: Pausing,
        jobs: JobStore,
        artifacts: ArtifactStore,
        history: History,
        ledgers: Ledgers,
        tracker: RoutePlanner,
        quotas: Quotas,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._submitter = submitter
        self._pausing = pausing
        self._quotas = quotas
        self._clock = clock
        self._jobs = jobs
        self._artifacts = artifacts
        self._history = history
        self._ledgers = ledgers
        self._tracker = tracker
        self._exporters: dict[str, Exporter] = {}
        self._unwritten: dict[str, float] = {}  # when writing an ending job's files first failed
        self._ended: dict[str, float] = {}  # when

    async def submit(self, spec: JobSpec, *, request_id: str, files: Mapping[str, bytes]) -> Job:
        """Create a job, or return the one that the same request created before.

        Raises:
            PacelineError: as `JobSubmitter.submit`.
        """
        job = JobParts(spec)
        return await self._submitter.submit(job, request_id=request_id, files=files)

    async def import_episodes(self, job_id: str, lines: str) -> ImportReport:
        """Store trajectories that were collected elsewhere, one a line, in a job's replay.

        Raises:
            InvalidError: the job has no replay, the size of its vocabulary is not known, or there
                is too much.
            StateError: it is over.
            DeadlineError: its tasks are being looked through; repeat the call.
        """
        if len(lines) > MAX_IMPORT_CHARS:
            raise InvalidError(f"lines: {len(lines)} characters; at most {MAX_IMPORT_CHARS}")
        job = await self._jobs.get(job_id)
        ledger = await self._ledgers.get(job_id)
        if (digest := job.artifacts.get("config.json")) is None:
            raise InvalidError("the model has no config.json, which tells the vocabulary")
        content = b"".join([each async for each in self._artifacts.chunks(digest)])
        return await ledger.imports.add(lines_of(lines), vocabulary=vocabulary_of(content))

    async def cancel(self, job_id: str, *, reason: str) -> Job:
        """Start to cancel a job: nothing more is leased or trained.

        Raises:
            StateError: it has ended already.
        """
        await self._jobs.cancel(job_id, reason=reason)
        ledger = await self._ledgers.find(job_id)
        if ledger is not None:
            await ledger.completion.cancel()
        self._ended[job_id] = self._clock()
        self._history.changed(job_id).fire()
        log.info("cancelling", job=job_id, reason=reason)
        return await self._jobs.get(job_id)

    async def set_state(self, job_id: str, state: JobState, *, reason: str) -> Job:
        """Move a job to another state; in that state already, only the reason can change.

        A job that is to fail does so even if this call is interrupted.

        Raises:
            TransitionError: `JOB_TRANSITIONS` does not allow it.
            UnavailableError: the end is delayed; retry.
        """
        now = (await self._jobs.get(job_id)).status.state
        if now is not state:
            check_job_transition(now, state)
        if state.terminal:
            await self._end_job(job_id, state, reason)
        elif state is JobState.PAUSED:
            await self._pausing.workers_ended(job_id, reason=reason)
        elif now is not state or state in EXPLAINED:
            # Whoever says why a job waits may not know that it was paused: only users resume it.
            origin = state if state is JobState.QUEUED else None
            await self._jobs.transition(job_id, state, reason=reason, origin=origin)
        self._history.changed(job_id).fire()
        return await self._jobs.get(job_id)

    async def _end_job(self, job_id: str, state: JobState, reason: str) -> None:
        if not (await self._jobs.get(job_id)).status.state.terminal:
            ledger = await self._ledgers.find(job_id)
            if ledger is not None and state is JobState.FAILED:
                await ledger.completion.fail(reason)
            elif ledger is not None:
                await ledger.completion.cancel()
        await self.conclude(job_id, state, reason)

    async def conclude(self, job_id: str, state: JobState, reason: str) -> None:
        """The job is over: write its results, then set its final state.

        Idempotent: may be called again after an error or a crash at any point.

        Raises:
            UnavailableError: its results cannot be written yet.
        """
        job = await self._jobs.get(job_id)
        if job.status.state.terminal:
            self._retire(job_id)
            return
        if state is JobState.SUCCEEDED:
            if job.status.state is JobState.CANCELLING:
                return  # the controller ends it
            if job.status.state is JobState.PAUSED:  # the store had lost that it was paused
                await self._jobs.transition(job_id, JobState.QUEUED)
            await start(self._jobs, job_id)
        ledger = await self._ledgers.find(job_id)
        if ledger is None:
            await self._set_final_state(job_id, state, reason)
            return
        await ledger.record()
        report = await ledger.verify()
        rows = await self._history.rows(job, after=0, limit=-1)
        summary = summarise(
            job, await ledger.live(), rows, state=state, ledger_consistent=report.ok
        )
        summary |= await self._write_results(job, summary, ledger)
        await self._set_final_state(job_id, state, reason, summary=json.dumps(summary))
        log.info("over", job=job_id, state=state, reason=reason, problems=len(report.problems))

    async def _write_results(
        self, job: Job, summary: dict[str, Any], ledger: JobLedger
    ) -> dict[str, Any]:
        """Write the last files of a job; returns what the summary says about them.

        Waits for a disk that refuses them, but not for ever: the store has the same data, and the
        job has to end.
        """
        job_id = job.status.job_id
        notes: dict[str, Any] = {}
        try:
            await self.export(job_id, name="final")
        except OSError as error:
            self._check_write_timeout(job_id, error)
            notes["not_written"] = str(error)
        notes["trajectories_missing"] = ledger.trajectories.exported.num_missing
        try:
            self._history.write_summary(job, summary | notes)
            self._history.write_record(await self._jobs.get(job_id))
        except OSError as error:
            self._check_write_timeout(job_id, error)
            notes["not_written"] = str(error)
        return notes

    def _check_write_timeout(self, job_id: str, error: OSError) -> None:
        since = self._unwritten.setdefault(job_id, self._clock())
        if self._clock() - since < _WRITE_TIMEOUT_S:
            text = f"the results of {job_id} cannot be written: {error}"
            raise UnavailableError(text) from None
        log.error("the job ends without all of its files", job=job_id, error=error)

    async def _set_final_state(
        self, job_id: str, state: JobState, reason: str, **fields: Any
    ) -> None:
        """Set the final state, unless a failure to open the ledger has already done so."""
        if not (await self._jobs.get(job_id)).status.state.terminal:
            await self._jobs.transition(job_id, state, reason=reason, **fields)
        self._retire(job_id)

    async def ended(self, kept: Iterable[str] = ()) -> list[str]:
        """Jobs of which nothing is sampled or scored any more.

        Those that have ended lately, for workers that miss a reply, and those of `kept`, for
        workers that miss more, or that have asked for something of a job after its end.
        """
        since = self._clock() - _ENDED_S
        self._ended = {job_id: at for job_id, at in self._ended.items() if at >= since}
        others = {*kept} - self._ended.keys() - self._ledgers.active.keys()
        return [*self._ended, *[each for each in sorted(others) if await self._is_over(each)]]

    async def _is_over(self, job_id: str) -> bool:
        try:
            return (await self._jobs.get(job_id)).status.state.terminal
        except NotFoundError:
            return True
        except StoreError:
            return False  # asked again soon

    def _retire(self, job_id: str) -> None:
        self._ended[job_id] = self._clock()
        self._ledgers.retire(job_id)
        self._tracker.forget(job_id)
        self._exporters.pop(job_id, None)
        self._unwritten.pop(job_id, None)
        self._history.changed(job_id).fire()

    async def forget(self, job_id: str) -> None:
        """The job is about to be deleted: nothing in this process holds its keys or files."""
        self._retire(job_id)
        await self._ledgers.discard(job_id)
        self._history.discard(job_id)

    async def export(self, job_id: str, *, name: str, before_step: int | None = None) -> None:
        """Write the trajectories trained since the last export, and all policy versions.

        Only steps below `before_step`; nothing for a job that is over.
        """
        ledger = await self._ledgers.get(job_id)
        if job_id not in self._ledgers.active:
            return
        versions = [asdict(version) for version in ledger.versions.listed()]
        write_json(self._history.folder(job_id) / "versions.json", versions)
        if job_id not in self._exporters:
            folder = self._history.folder(job_id) / "trajectories"
            self._exporters[job_id] = Exporter(folder)
        await self._exporters[job_id].export(ledger, name=name, before_step=before_step)
        await ledger.trim()

    async def watch(self, job_id: str, *, after: int) -> AsyncIterator[Event]:
        """Yield the present state, then every change and at least one event a second."""
        seen = _checked_offset(after)
        while True:
            changed = self._history.changed(job_id).event()
            job = await self._jobs.get(job_id)
            rows = await self._page(job, after=seen, limit=_ROWS)
            seen += len(rows)
            ledger = self._ledgers.peek(job_id)
            yield Event(job.status, rows, await ledger.live() if ledger else None)
            if job.status.state.terminal and seen >= await self._history.count(job):
                return
            await wait(changed, _WATCH_S)
            await asyncio.sleep(_MIN_EVENT_INTERVAL_S)  # many changes make one event

    async def note_tracker(self, job_id: str, tracker: TrackerStatus) -> None:
        """Store the status of a tracker.

        Raises:
            InvalidError: the job has no tracker of this name.
        """
        spec = job_of(await self._jobs.get(job_id))
        names = [each.label for each in spec.tracking]
        if tracker.name not in names:
            raise InvalidError(f"tracker.name: {tracker.name!r} is not tracked; allowed: {names}")
        await self._jobs.note_tracker(job_id, tracker)

    async def rows(
        self, job_id: str, *, after: int, page_size: int
    ) -> tuple[list[JobMetricRow], int]:
        """Rows of the history from `after` on, and the next offset; 0: no more at present."""
        job = await self._jobs.get(job_id)
        found = await self._page(job, after=_checked_offset(after), limit=page_size)
        end = after + len(found)
        return found, end if end < await self._history.count(job) else 0

    async def _page(self, job: Job, *, after: int, limit: int) -> list[JobMetricRow]:
        max_bytes = self._quotas.settings.page_bytes
        return await self._history.page(job, after=after, limit=limit, max_bytes=max_bytes)


def _checked_offset(after: int) -> int:
    """Check an offset into the history."""
    if not 0 <= after <= _MAX_ROWS:
        raise InvalidError(f"after: {after} rows cannot be skipped; 0 to {_MAX_ROWS} are allowed")
    return after
