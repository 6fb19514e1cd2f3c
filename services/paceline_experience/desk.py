"""What users and the controller ask of jobs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from paceline.config import JobSpec, parse_job
from paceline.config.documents import read_json
from paceline.errors import InvalidError, UnavailableError
from paceline.files import write_json
from paceline.logs import Log
from paceline.types import EXPLAINED, Job, JobState, JobStatus, TrackerStatus, check_job_step
from paceline_experience.artefacts import Artefacts
from paceline_experience.dry_run import DryRun
from paceline_experience.export import Exporter
from paceline_experience.history import History, Row, summarise
from paceline_experience.hooks import start
from paceline_experience.jobs import JobStore
from paceline_experience.ledger import JobLedger
from paceline_experience.ledgers import Ledgers, OverError
from paceline_experience.quotas import Quotas
from paceline_experience.roster import wait
from paceline_experience.routes import Tracker
from paceline_experience.sources import check_plugins, task_sources

log = Log("desk")
_ROWS = 1000
_MAX_ROWS = 2**53 - 1
_WATCH_S = 1.0
_LEAST_S = 0.1
_FILES_S = 60.0  # how long the end of a job waits for a disk that takes no files


@dataclass(frozen=True, slots=True)
class Event:
    """What a watcher of a job is told."""

    status: JobStatus
    rows: list[Row]
    live: dict[str, Any]


class Desk:
    """Submits, watches, moves and concludes jobs."""

    def __init__(
        self,
        *,
        jobs: JobStore,
        artefacts: Artefacts,
        history: History,
        ledgers: Ledgers,
        tracker: Tracker,
        quotas: Quotas,
        dry_run: DryRun,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quotas = quotas
        self._dry_run = dry_run
        self._clock = clock
        self._jobs = jobs
        self._artefacts = artefacts
        self._history = history
        self._ledgers = ledgers
        self._tracker = tracker
        self._exporters: dict[str, Exporter] = {}
        self._unwritten: dict[str, float] = {}  # since when the files of ending jobs are refused

    async def submit(self, spec: JobSpec, *, request_id: str, files: Mapping[str, bytes]) -> Job:
        """A new job, or the one that the same request made before.

        Raises:
            InvalidError: a plug-in is not installed or refuses its options, or there are no tasks.
            LimitError: the spec, or its files, are too large.
            ConflictError: the request made a job from another spec.
            QuotaError: its tenant has as many jobs that are not over as it may.
        """
        made = await self._jobs.find(spec.tenant, request_id)
        if made is not None:
            return await self._create(spec, request_id, made.artefacts)
        await self._jobs.check_room(spec.tenant, self._quotas.of(spec.tenant).submitted)
        self._check_sizes(spec, files)
        # The child would say the same, but one that has refused a job is not used again.
        await asyncio.to_thread(check_plugins, spec)
        await self._dry_run.check(spec)
        sources = await asyncio.to_thread(task_sources, spec)
        job = await self._create(spec, request_id, await self._artefacts.put(files))
        if not job.status.state.terminal:
            with suppress(OverError):
                await self._ledgers.activate(job, sources)
        return job

    async def _create(self, spec: JobSpec, request_id: str, artefacts: Mapping[str, str]) -> Job:
        most = self._quotas.of(spec.tenant).submitted
        job = await self._jobs.create(spec, artefacts=artefacts, request_id=request_id, most=most)
        log.info("submitted", job=job.status.job_id, tenant=spec.tenant)
        return job

    def _check_sizes(self, spec: JobSpec, files: Mapping[str, bytes]) -> None:
        num_bytes = len(spec.model_dump_json().encode())
        self._quotas.check(spec.tenant, "spec_bytes", num_bytes)
        self._quotas.check(spec.tenant, "model_files_bytes", sum(map(len, files.values())))

    async def cancel(self, job_id: str, *, reason: str) -> Job:
        """Ask a job to end: nothing is leased or trained any more.

        Raises:
            StateError: it has ended already.
        """
        await self._jobs.cancel(job_id, reason=reason)
        ledger = await self._ledgers.find(job_id)
        if ledger is not None:
            await ledger.stop("cancelled")
        self._history.changed(job_id).fire()
        log.info("cancelling", job=job_id, reason=reason)
        return await self._jobs.get(job_id)

    async def set_state(self, job_id: str, state: JobState, *, reason: str) -> Job:
        """Move a job on; the same state again changes nothing, but why a job waits.

        A job that is to fail does, even if this call does not come to its end.

        Raises:
            TransitionError: the table of job states does not allow it.
            UnavailableError: its end is put off; ask again.
        """
        now = (await self._jobs.get(job_id)).status.state
        if now is not state:
            check_job_step(now, state)
        if state.terminal:
            await self._bring_to_end(job_id, state, reason)
        elif now is not state or state in EXPLAINED:
            await self._jobs.step(job_id, state, reason=reason)
        self._history.changed(job_id).fire()
        return await self._jobs.get(job_id)

    async def _bring_to_end(self, job_id: str, state: JobState, reason: str) -> None:
        if not (await self._jobs.get(job_id)).status.state.terminal:
            ledger = await self._ledgers.find(job_id)
            if ledger is not None and state is JobState.FAILED:
                await ledger.fail(reason)
            elif ledger is not None:
                await ledger.stop("cancelled")
        await self.conclude(job_id, state, reason)

    async def conclude(self, job_id: str, state: JobState, reason: str) -> None:
        """The job is over: write what is left of it, then say so.

        May be told again after an error or a crash, at any point.

        Raises:
            UnavailableError: what is left of it cannot be written yet.
        """
        job = await self._jobs.get(job_id)
        if job.status.state.terminal:
            self._retire(job_id)
            return
        if state is JobState.SUCCEEDED:
            if job.status.state is JobState.CANCELLING:
                return  # the controller brings it to its end
            await start(self._jobs, job_id)
        ledger = await self._ledgers.find(job_id)
        if ledger is None:
            await self._end(job_id, state, reason)
            return
        await ledger.record()
        report = await ledger.audit()
        rows = await self._history.rows(job, after=0, limit=-1)
        summary = summarise(job, await ledger.live(), rows, state=state, audit_ok=report.ok)
        summary |= await self._write_results(job, summary, ledger)
        await self._end(job_id, state, reason, summary=json.dumps(summary))
        log.info("over", job=job_id, state=state, reason=reason, problems=len(report.problems))

    async def _write_results(
        self, job: Job, summary: dict[str, Any], ledger: JobLedger
    ) -> dict[str, Any]:
        """The last files of a job; what there is to say about them.

        A disk that takes none is waited for, but not for ever: the store keeps what they would
        say, and the job has to end.
        """
        job_id = job.status.job_id
        told: dict[str, Any] = {}
        try:
            await self.export(job_id, name="final")
        except OSError as error:
            self._check_patience(job_id, error)
            told["not_written"] = str(error)
        told["trajectories_missing"] = ledger.trajectories.exported.num_missing
        try:
            self._history.write_summary(job, summary | told)
        except OSError as error:
            self._check_patience(job_id, error)
            told["not_written"] = str(error)
        return told

    def _check_patience(self, job_id: str, error: OSError) -> None:
        since = self._unwritten.setdefault(job_id, self._clock())
        if self._clock() - since < _FILES_S:
            text = f"the results of {job_id} cannot be written: {error}"
            raise UnavailableError(text) from None
        log.error("ends without all of its files", job=job_id, error=error)

    async def _end(self, job_id: str, state: JobState, reason: str, **fields: str) -> None:
        """Say that a job is over, unless it has ended over its own ledger."""
        if not (await self._jobs.get(job_id)).status.state.terminal:
            await self._jobs.step(job_id, state, reason=reason, **fields)
        self._retire(job_id)

    def _retire(self, job_id: str) -> None:
        self._ledgers.retire(job_id)
        self._tracker.forget(job_id)
        self._exporters.pop(job_id, None)
        self._unwritten.pop(job_id, None)
        self._history.changed(job_id).fire()

    async def export(self, job_id: str, *, name: str, before_step: int | None = None) -> None:
        """Write the trajectories that were trained since the last export, unless it is over.

        Of steps below `before_step`. And what each policy version in them was.
        """
        ledger = await self._ledgers.get(job_id)
        if job_id not in self._ledgers.active:
            return
        versions = [asdict(version) for version in ledger.publications()]
        write_json(self._history.folder(job_id) / "versions.json", versions)
        if job_id not in self._exporters:
            folder = self._history.folder(job_id) / "trajectories"
            self._exporters[job_id] = Exporter(folder)
        await self._exporters[job_id].export(ledger, name=name, before_step=before_step)
        await ledger.trim()

    async def watch(self, job_id: str, *, after: int) -> AsyncIterator[Event]:
        """The state now, then every change and at least one event a second, until the end."""
        seen = _place(after)
        while True:
            changed = self._history.changed(job_id).event()
            job = await self._jobs.get(job_id)
            rows = await self._page(job, after=seen, limit=_ROWS)
            seen += len(rows)
            ledger = self._ledgers.peek(job_id)
            yield Event(job.status, rows, await ledger.live() if ledger else {})
            if job.status.state.terminal and seen >= await self._history.count(job):
                return
            await wait(changed, _WATCH_S)
            await asyncio.sleep(_LEAST_S)  # many changes make one event

    async def note_tracker(self, job_id: str, tracker: TrackerStatus) -> None:
        """Keep how far a tracker has come.

        Raises:
            InvalidError: the job has no tracker of this name.
        """
        spec = parse_job(json.loads((await self._jobs.get(job_id)).spec))
        names = [each.label for each in spec.tracking]
        if tracker.name not in names:
            raise InvalidError(f"tracker.name: {tracker.name!r} is not tracked; allowed: {names}")
        await self._jobs.note_tracker(job_id, tracker)

    async def rows(self, job_id: str, *, after: int, page_size: int) -> tuple[list[Row], int]:
        """Rows of the history from `after` on, and where to go on; 0: no more at the moment."""
        size = max(1, min(page_size or 500, 5000))
        job = await self._jobs.get(job_id)
        found = await self._page(job, after=_place(after), limit=size)
        end = after + len(found)
        return found, end if end < await self._history.count(job) else 0

    async def _page(self, job: Job, *, after: int, limit: int) -> list[Row]:
        max_bytes = self._quotas.settings.page_bytes
        return await self._history.page(job, after=after, limit=limit, max_bytes=max_bytes)


def read_spec(text: str) -> JobSpec:
    """The job in a JSON document; raises `InvalidError`."""
    return parse_job(read_json(text, what="spec_json"))


def _place(after: int) -> int:
    """A number of rows that the store can skip."""
    if not 0 <= after <= _MAX_ROWS:
        raise InvalidError(f"after: {after} rows cannot be skipped; 0 to {_MAX_ROWS} are allowed")
    return after
