"""What trainers ask of their job: incarnations, steps, publications."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, Protocol

from paceline.errors import PacelineError, StateError
from paceline.logs import Log
from paceline.types import Job, JobState, PolicyVersion
from paceline_experience.jobs import JobStore
from paceline_experience.ledgers import Ledgers
from paceline_experience.routes import Tracker
from paceline_experience.shares import BatchShare

log = Log("training")


class Export(Protocol):
    """Writes what a job has trained since the last export."""

    def __call__(self, job_id: str, *, name: str) -> Coroutine[Any, Any, None]:
        """To the file of this name."""
        ...


class Training:
    """The ledger decides; this notes in the job's record what its status shows."""

    def __init__(
        self, *, jobs: JobStore, ledgers: Ledgers, tracker: Tracker, export: Export
    ) -> None:
        self._jobs = jobs
        self._ledgers = ledgers
        self._tracker = tracker
        self._export = export
        self._exports: set[asyncio.Task[None]] = set()

    async def grant_incarnation(self, job_id: str) -> int:
        """The number of the next start of a trainer.

        Raises:
            StateError: the job is over or about to be.
        """
        state = (await self._jobs.get(job_id)).status.state
        if state.terminal or state is JobState.CANCELLING:
            raise StateError(f"job {job_id} is {state}: no trainer may start")
        number = await (await self._ledgers.get(job_id)).grant_incarnation()
        await self._jobs.note(job_id, incarnation=number)
        return number

    async def rewind(self, job_id: str, *, incarnation: int, step: int) -> tuple[int, int]:
        """Where an incarnation starts: its step, and the newest version."""
        ledger = await self._ledgers.get(job_id)
        now, parent = await ledger.rewind(incarnation=incarnation, step=step)
        await self._jobs.note(job_id, step=now)
        return now, parent

    async def take(
        self, job_id: str, *, incarnation: int, step: int, rank: int, world: int
    ) -> BatchShare:
        """One rank's part of a batch; waits for it."""
        ledger = await self._ledgers.get(job_id)
        return await ledger.take(incarnation=incarnation, step=step, rank=rank, world=world)

    async def commit(
        self, job_id: str, *, incarnation: int, step: int, batch_id: str, metrics: dict[str, Any]
    ) -> tuple[int, str]:
        """A step is trained: the ledger's step, and why no further batch will come."""
        ledger = await self._ledgers.get(job_id)
        now, stop = await ledger.commit(
            incarnation=incarnation, step=step, batch_id=batch_id, metrics=metrics
        )
        await self._jobs.note(job_id, step=now)
        return now, stop

    async def checkpointed(self, job_id: str, *, incarnation: int, step: int, path: str) -> None:
        """A checkpoint is durable; what was trained up to it goes to files beside the calls."""
        ledger = await self._ledgers.get(job_id)
        await ledger.checkpointed(incarnation=incarnation, step=step, path=path)
        task = asyncio.create_task(self._export_beside(job_id, step), name="export")
        self._exports.add(task)
        task.add_done_callback(self._exports.discard)

    async def announce(
        self,
        job_id: str,
        *,
        incarnation: int,
        step: int,
        parent: int,
        num_bytes: int,
        endpoint: str,
    ) -> tuple[PolicyVersion, int]:
        """Number a publication and send the rollout workers for it; also the version they hold."""
        ledger = await self._ledgers.get(job_id)
        version = await ledger.announce(
            incarnation=incarnation, step=step, parent=parent, num_bytes=num_bytes
        )
        published = json.dumps({"source": endpoint, "version": asdict(version)})
        await self._jobs.note(job_id, version=version.version, published=published)
        held = await ledger.hold()
        self._tracker.announce(job_id, version, source=endpoint, held=held)
        return version, held

    async def restore(self, job: Job) -> None:
        """Tell the tracker what was published last."""
        job_id = job.status.job_id
        (text,) = await self._jobs.noted(job_id, "published")
        if text:
            published = json.loads(text)
            version = PolicyVersion(**published["version"])
            self._tracker.announce(job_id, version, source=published["source"])

    async def close(self) -> None:
        """Let exports come to their end."""
        await asyncio.gather(*self._exports)

    async def _export_beside(self, job_id: str, step: int) -> None:
        try:
            await self._export(job_id, name=f"step-{step:06d}")
        except (PacelineError, OSError) as error:
            log.warning("trajectories not written", job=job_id, step=step, error=error)
