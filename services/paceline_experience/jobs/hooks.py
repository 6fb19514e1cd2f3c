"""Callbacks from a job's ledger to the rest of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from paceline.enums import JobState
from paceline.types import CheckpointStatus, Job
from paceline_experience.jobs.history import History, JobMetricRow
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.record import CHECKPOINT_LIST, CHECKPOINTS

Conclude = Callable[[str, JobState, str], Awaitable[None]]


class JobHooks:
    """Keeps metric rows, moves the job to `running`, and concludes it."""

    def __init__(
        self,
        *,
        job: Job,
        main_eval: str | None,
        jobs: JobStore,
        history: History,
        conclude: Conclude,
    ) -> None:
        """`main_eval`: the name of the evaluation that the job's status shows; None: of none."""
        self._job = job
        self._jobs = jobs
        self._history = history
        self._conclude = conclude
        self._main = main_eval
        self._measured: JobMetricRow | None = None  # not in the job's status yet

    async def recorded(self) -> None:
        """Follow the history; the newest complete main eval also shows in the job's status."""
        for row in await self._history.follow(self._job):
            is_main = row.kind == "eval" and row.values.get("set", "") == self._main
            if is_main and row.values.get("complete"):
                self._measured = row
        if self._measured is not None:
            reward, step = float(self._measured.values["reward"]), self._measured.step
            await self._jobs.note(self._job.status.job_id, eval_reward=repr(reward), eval_step=step)
            self._measured = None

    async def finished(self, *, state: str, reason: str) -> None:
        """The job is over."""
        await self._conclude(self._job.status.job_id, JobState(state), reason)

    async def running(self) -> None:
        """The first version was published."""
        job_id = self._job.status.job_id
        await start(self._jobs, job_id)
        self._history.changed(job_id).fire()

    async def checkpoints(self, listed: tuple[CheckpointStatus, ...]) -> None:
        """These checkpoints exist now; they show in the job's status."""
        job_id, text = self._job.status.job_id, CHECKPOINT_LIST.dump_json(listed).decode()
        await self._jobs.note(job_id, **{CHECKPOINTS: text})
        await asyncio.to_thread(self._history.write_record, await self._jobs.get(job_id))
        self._history.changed(job_id).fire()

    async def store_rolled_back(self) -> None:
        """The store has lost rows: rewrite the file from the store."""
        await self._history.follow(self._job, rewrite=True)


async def start(jobs: JobStore, job_id: str) -> None:
    """Move a job that is not running to `running`."""
    job = await jobs.get(job_id)
    if job.status.state is JobState.QUEUED:
        job = await jobs.transition(job_id, JobState.STARTING)
    if job.status.state is JobState.STARTING:
        await jobs.transition(job_id, JobState.RUNNING)
