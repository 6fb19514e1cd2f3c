"""What a job's ledger tells the rest of the service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from paceline.types import Job, JobState
from paceline_experience.history import History
from paceline_experience.jobs import JobStore

Conclude = Callable[[str, JobState, str], Awaitable[None]]


class JobHooks:
    """Keeps metric rows, moves the job to `running`, and concludes it."""

    def __init__(self, *, job: Job, jobs: JobStore, history: History, conclude: Conclude) -> None:
        self._job = job
        self._jobs = jobs
        self._history = history
        self._conclude = conclude

    async def metric(self, *, step: int, kind: str, values: dict[str, Any]) -> None:
        """A row for the history; a complete eval also shows in the job's status."""
        if kind == "eval" and values.get("complete"):
            reward = repr(float(values["reward"]))
            await self._jobs.note(self._job.status.job_id, eval_reward=reward, eval_step=step)
        await self._history.add(self._job, step=step, kind=kind, values=values)

    async def finished(self, *, state: str, reason: str) -> None:
        """The job is over."""
        await self._conclude(self._job.status.job_id, JobState(state), reason)

    async def running(self) -> None:
        """The first version was announced."""
        job_id = self._job.status.job_id
        await start(self._jobs, job_id)
        self._history.changed(job_id).fire()

    async def went_back(self) -> None:
        """The store has lost rows: the file beside it shows what the store has."""
        await self._history.open(self._job)


async def start(jobs: JobStore, job_id: str) -> None:
    """Bring a job that has not run yet to `running`."""
    job = await jobs.get(job_id)
    if job.status.state is JobState.QUEUED:
        job = await jobs.step(job_id, JobState.STARTING)
    if job.status.state is JobState.STARTING:
        await jobs.step(job_id, JobState.RUNNING)
