"""Pauses and resumes jobs: the job's record says what was asked for, its ledger does it."""

from __future__ import annotations

from paceline.enums import JobState, StopReason
from paceline.errors import StateError, TransitionError
from paceline.platform.telemetry.logs import Log
from paceline.types import Job
from paceline_experience.jobs.history import History
from paceline_experience.jobs.hooks import start
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.ledger.ledger import JobLedger

_UNDER_WAY = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING})
PAUSED = frozenset({JobState.PAUSING, JobState.PAUSED})
_ATTEMPTS = 3  # while the controller moves the job on at the same moment
log = Log("pausing")


class Pausing:
    """`pause` and `resume` of jobs, and `repair` of what a crash has left between the two writes.

    The ledger is written first: it alone knows whether the job is about to end. A ledger that is
    paused without its record goes on with the next start of the trainer; that of a job without
    one, in which an outside endpoint answers, begins and goes on with `repair`.
    """

    def __init__(self, *, jobs: JobStore, ledgers: Ledgers, history: History) -> None:
        self._jobs = jobs
        self._ledgers = ledgers
        self._history = history

    async def pause(self, job_id: str, *, reason: str) -> Job:
        """Start to pause a job; of one that is paused already, nothing changes.

        Raises:
            StateError: it is over, or about to end.
            UnavailableError: its ledger is not open yet; retry.
        """
        for _ in range(_ATTEMPTS):
            job = await self._jobs.get(job_id)
            state = job.status.state
            if state in PAUSED:
                return job
            if state not in _UNDER_WAY:
                raise StateError(f"job {job_id} is {state}: it cannot be paused")
            await (await self._ledgers.get(job_id)).pauses.begin()
            # A job that waits for capacity has no workers that would have to end.
            to = JobState.PAUSED if state is JobState.QUEUED else JobState.PAUSING
            try:
                await self._jobs.transition(job_id, to, reason=reason)
            except TransitionError:  # it has started, or ended, meanwhile
                continue
            if to is JobState.PAUSED:
                await self._hold(job_id)
            self._history.changed(job_id).fire()
            log.info("pausing", job=job_id, reason=reason)
            return await self._jobs.get(job_id)
        raise StateError(f"job {job_id} changes at this moment; pause it again")

    async def resume(self, job_id: str, *, reason: str) -> Job:
        """Queue a paused job again; of one that is not paused, nothing changes.

        Raises:
            StateError: it is over or being cancelled, or its trainer has not ended yet.
        """
        job = await self._jobs.get(job_id)
        state = job.status.state
        if state in _UNDER_WAY:
            return job
        if state is JobState.PAUSING:
            raise StateError(f"job {job_id} is still pausing; resume it once it is paused")
        if state is not JobState.PAUSED:
            raise StateError(f"job {job_id} is {state}: it cannot be resumed")
        job = await self._jobs.transition(job_id, JobState.QUEUED, reason=reason)
        self._history.changed(job_id).fire()
        log.info("resumed", job=job_id, reason=reason)
        return job

    async def workers_ended(self, job_id: str, *, reason: str) -> None:
        """None of the workers of a pausing job is left: it is paused.

        Raises:
            TransitionError: it is not pausing; the controller may not know yet that it was resumed.
        """
        # Checked by the store, since a user may resume it at this moment.
        await self._jobs.transition(job_id, JobState.PAUSED, reason=reason, origin=JobState.PAUSING)
        await self._hold(job_id)

    async def _hold(self, job_id: str) -> None:
        ledger = await self._ledgers.get(job_id)
        if ledger.pauses.stop is None:  # a trainer was admitted at the same moment
            await ledger.pauses.begin()
        await ledger.pauses.hold()

    async def repair(self) -> None:
        """Make ledgers follow the records of their jobs; call it every second or so."""
        for job_id, _, state in await self._jobs.states():
            entry = self._ledgers.active.get(job_id)
            if entry is None:
                continue
            with self._ledgers.isolate("cannot repair a pause", job_id):
                await self._follow(job_id, state, entry.ledger)
                if entry.spec.model.endpoint is not None:
                    await _begin(state, entry.ledger)

    async def _follow(self, job_id: str, state: JobState, ledger: JobLedger) -> None:
        pauses, stop = ledger.pauses, ledger.pauses.stop
        if state in PAUSED and stop is None:
            await pauses.begin()
        if state is JobState.PAUSED and stop is StopReason.PAUSED and not pauses.held:
            await pauses.hold()
        if state is JobState.STARTING and pauses.over:
            await start(self._jobs, job_id)


async def _begin(state: JobState, ledger: JobLedger) -> None:
    """Begin a job that nothing has to be started for, once the controller has let it start."""
    if state is JobState.STARTING or (state is JobState.RUNNING and not ledger.pauses.is_started):
        await ledger.begin()
