"""What trainers ask of their job: incarnations, steps, publications."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from paceline.errors import PacelineError, StateError
from paceline.logs import Log
from paceline.types import TRAINER_SAYS, Job, JobState, PolicyVersion
from paceline.weights.route import Source
from paceline_experience.jobs import JobStore
from paceline_experience.ledgers import Ledgers
from paceline_experience.routes import Publication, Tracker
from paceline_experience.shares import BatchShare

log = Log("training")
MOST_REASON_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Announced:
    """What a seed is told."""

    version: PolicyVersion
    held: int  # version to keep serving; -1: none
    key: bytes = field(repr=False)
    chunk_bytes: int
    source: str  # endpoint of part 0


class Export(Protocol):
    """Writes what a job has trained since the last export."""

    def __call__(
        self, job_id: str, *, name: str, before_step: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """To the file of this name, in steps below `before_step`."""
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
        # Seeds of one version are noted one after the other; a lock lives while it is used.
        self._announcing = WeakValueDictionary[str, asyncio.Lock]()
        self._exports: set[asyncio.Task[None]] = set()

    async def grant_incarnation(self, job_id: str) -> int:
        """The number of the next start of a trainer.

        Raises:
            StateError: the job is over or about to be.
        """
        state = (await self._jobs.get(job_id)).status.state
        if state.terminal or state is JobState.CANCELLING:
            raise StateError(f"job {job_id} is {state}: no trainer may start")
        ledger = await self._ledgers.get(job_id)
        if ledger.closed:
            raise StateError(f"job {job_id} is about to end: no trainer may start")
        number = await ledger.grant_incarnation()
        await self._jobs.note(job_id, incarnation=number)
        return number

    async def rewind(
        self, job_id: str, *, incarnation: int, step: int, reason: str = ""
    ) -> tuple[int, int]:
        """Where an incarnation starts: its step, and the newest version.

        Why it passes over newer checkpoints shows in the job's status.
        """
        ledger = await self._ledgers.get(job_id)
        now, parent = await ledger.rewind(incarnation=incarnation, step=step)
        await self._jobs.note(job_id, step=now)
        if reason:
            log.error("passes over damaged checkpoints", job=job_id, step=now, reason=reason)
            await self._jobs.note(job_id, reason=f"{TRAINER_SAYS}{reason}"[:MOST_REASON_CHARS])
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

    async def checkpointed(
        self, job_id: str, *, incarnation: int, step: int, path: str, kept: Sequence[int] = ()
    ) -> None:
        """A checkpoint is durable; what was trained up to it goes to files beside the calls."""
        ledger = await self._ledgers.get(job_id)
        await ledger.checkpointed(incarnation=incarnation, step=step, path=path, kept=kept)
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
        seed: Source,
        digest: str = "",
        number: int = -1,
    ) -> Announced:
        """Number a publication and send the rollout workers for it.

        Part 0 makes the version, the other seeds of the same step join it. `number` is what it was
        given before, if it was.

        Raises:
            UnavailableError: part 0 has not been announced yet.
            StateError: a later step has been.
        """
        async with self._announcing.setdefault(job_id, asyncio.Lock()):
            ledger = await self._ledgers.get(job_id)
            if seed.part:
                version = await ledger.publication(incarnation=incarnation, step=step)
            else:
                version = await ledger.announce(
                    incarnation=incarnation,
                    step=step,
                    parent=parent,
                    num_bytes=num_bytes,
                    digest=digest,
                    number=number,
                    above=self._tracker.highest(job_id),
                )
            made = self._tracker.publication(job_id, version, seed)
            key = await self._jobs.weights_key(job_id)
            published = json.dumps(asdict(made))
            await self._jobs.note(job_id, version=made.version.version, published=published)
            held = await ledger.hold()
            # Rank 0 tells the digest when all is staged: the job may be over by then.
            if job_id in self._ledgers.active:
                self._tracker.announce(job_id, made, key=key, held=held)
        return Announced(made.version, held, key, made.chunk_bytes, made.source)

    async def restore(self, job: Job, *, held: int) -> None:
        """Tell the tracker what was published last, and the version that workers stay at."""
        job_id = job.status.job_id
        (text,) = await self._jobs.noted(job_id, "published")
        if text:
            key = await self._jobs.weights_key(job_id)
            made = self._publication(job_id, json.loads(text))
            self._tracker.announce(job_id, made, key=key, held=held)

    def _publication(self, job_id: str, note: dict[str, Any]) -> Publication:
        version = PolicyVersion(**note["version"])
        if "seeds" not in note:  # by a release that knew of one seed only
            chunk_bytes = self._tracker.chunk_bytes(job_id, version.num_bytes)
            return Publication(version, chunk_bytes, (Source(note["source"]),))
        seeds = tuple(Source(**seed) for seed in note["seeds"])
        return Publication(version, int(note["chunk_bytes"]), seeds, note["site"])

    async def close(self) -> None:
        """Let exports come to their end."""
        await asyncio.gather(*self._exports)

    async def _export_beside(self, job_id: str, step: int) -> None:
        try:
            await self._export(job_id, name=f"step-{step:06d}", before_step=step)
        except (PacelineError, OSError) as error:
            log.warning("trajectories not written", job=job_id, step=step, error=error)
