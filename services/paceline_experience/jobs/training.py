"""Operations for trainers: incarnations, steps, publications."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from paceline.enums import TRAINER_SAYS, JobState, StopReason, WorkerKind
from paceline.errors import PacelineError, StateError
from paceline.platform.telemetry.logs import Log
from paceline.types import Job, PolicyVersion, WorkerMismatch
from paceline.weights.route import ChunkSource
from paceline_experience.fleet.roster import Member
from paceline_experience.fleet.routes import RoutePlanner, SeededVersion
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.jobs.pausing import PAUSED
from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.ledger.shares import BatchShare

log = Log("training")
MAX_REASON_CHARS = 2000


@dataclass(frozen=True, slots=True)
class SeedInstructions:
    """The answer to a seed that publishes a version."""

    version: PolicyVersion
    held: int  # version to keep serving; -1: none
    key: bytes = field(repr=False)
    chunk_bytes: int
    source: str  # endpoint of part 0


class ExportTrained(Protocol):
    """Exports what a job has trained since the last export."""

    def __call__(
        self, job_id: str, *, name: str, before_step: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Write steps below `before_step` to the file of this name."""
        ...


class Training:
    """Passes calls to the ledger and copies to the job's record what its status shows."""

    def __init__(
        self, *, jobs: JobStore, ledgers: Ledgers, tracker: RoutePlanner, export: ExportTrained
    ) -> None:
        self._jobs = jobs
        self._ledgers = ledgers
        self._tracker = tracker
        self._export = export
        # Seeds of one version are added one at a time; a lock lives while it is in use.
        self._publishing = WeakValueDictionary[str, asyncio.Lock]()
        self._exports: set[asyncio.Task[None]] = set()

    async def grant_incarnation(self, job_id: str) -> int:
        """Number the next start of a trainer.

        Raises:
            StateError: the job is over or about to end, or paused.
        """
        state = (await self._jobs.get(job_id)).status.state
        if state.terminal or state is JobState.CANCELLING or state in PAUSED:
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
        """Start an incarnation at a checkpoint; returns its step and the newest version.

        `reason`, why it skips newer checkpoints, shows in the job's status.
        """
        ledger = await self._ledgers.get(job_id)
        now, parent = await ledger.rewind(incarnation=incarnation, step=step)
        await self._jobs.note(job_id, step=now)
        if reason:
            log.error("skipping damaged checkpoints", job=job_id, step=now, reason=reason)
            await self._jobs.note(job_id, reason=f"{TRAINER_SAYS}{reason}"[:MAX_REASON_CHARS])
        return now, parent

    async def take(
        self, job_id: str, *, incarnation: int, step: int, rank: int, world: int
    ) -> BatchShare:
        """One rank's share of a batch; waits for it."""
        ledger = await self._ledgers.get(job_id)
        return await ledger.take(incarnation=incarnation, step=step, rank=rank, world=world)

    async def commit(
        self,
        job_id: str,
        *,
        incarnation: int,
        step: int,
        batch_id: str,
        metrics: dict[str, Any],
        mismatches: Sequence[WorkerMismatch] = (),
    ) -> tuple[int, StopReason | None]:
        """Commit a trained step; returns the ledger's step and the stop reason, if any."""
        ledger = await self._ledgers.get(job_id)
        now, stop = await ledger.commit(
            incarnation=incarnation, step=step, batch_id=batch_id, metrics=metrics
        )
        ledger.agreement.hear(mismatches)
        await self._jobs.note(job_id, step=now)
        return now, stop

    async def checkpoints(self, job_id: str, *, incarnation: int) -> Mapping[int, str]:
        """Digests of the checkpoints that this incarnation may load, by step."""
        ledger = await self._ledgers.get(job_id)
        return await ledger.batches.checkpoints(incarnation=incarnation)

    async def commit_checkpoint(
        self,
        job_id: str,
        *,
        incarnation: int,
        step: int,
        path: str,
        kept: Sequence[int] = (),
        digest: str = "",
    ) -> tuple[int, ...]:
        """A checkpoint is durable; exports in the background what was trained up to it.

        Returns the steps of checkpoints that stay beside the newest ones.
        """
        ledger = await self._ledgers.get(job_id)
        stay = await ledger.commit_checkpoint(
            incarnation=incarnation, step=step, path=path, kept=kept, digest=digest
        )
        task = asyncio.create_task(self._export_up_to(job_id, step), name="export")
        self._exports.add(task)
        task.add_done_callback(self._exports.discard)
        return stay

    async def publish_version(
        self,
        job_id: str,
        *,
        incarnation: int,
        step: int,
        parent: int,
        num_bytes: int,
        seed: ChunkSource,
        digest: str = "",
        number: int = -1,
    ) -> SeedInstructions:
        """Number a publication and route the rollout workers to it.

        Part 0 creates the version; the other seeds of the same step join it. `number` is the number
        that it got from an earlier call, if any.

        Raises:
            UnavailableError: part 0 has not been announced yet.
            StateError: a later step was announced.
        """
        async with self._publishing.setdefault(job_id, asyncio.Lock()):
            ledger = await self._ledgers.get(job_id)
            if seed.part:
                version = await ledger.versions.of_step(step, incarnation=incarnation)
            else:
                version = await ledger.publish_version(
                    incarnation=incarnation,
                    step=step,
                    parent=parent,
                    num_bytes=num_bytes,
                    digest=digest,
                    number=number,
                    above=self._tracker.highest(job_id),
                )
            seeded = self._tracker.publication(job_id, version, seed)
            key = await self._jobs.weights_key(job_id)
            published = json.dumps(asdict(seeded))
            await self._jobs.note(job_id, version=seeded.version.version, published=published)
            held = ledger.evals.held_version()
            # Rank 0 sends the digest when everything is staged: the job may be over by then.
            if job_id in self._ledgers.active:
                self._tracker.announce(job_id, seeded, key=key, held=held)
        return SeedInstructions(seeded.version, held, key, seeded.chunk_bytes, seeded.source)

    async def judge(self, job_id: str, ledger: JobLedger) -> None:
        """Hear what rollout workers say of the newest version; nobody is routed to a withdrawn one.

        To be called over and over.
        """
        members = self._tracker.receivers(job_id)
        ledger.agreement.keep(member.worker.worker_id for member in members)
        try:
            await ledger.versions.hear(
                serving=[member.worker.active_version for member in members],
                refusals=[member.refusal for member in members],
            )
        except PacelineError as error:
            log.warning("verdicts on weights are not recorded", job=job_id, error=error)
        for version in ledger.versions.withdrawn:
            self._tracker.withdraw(job_id, version)

    def at_fault(self, member: Member) -> bool:
        """Whether a worker refuses a version that another one has served."""
        entry, refusal = self._ledgers.active.get(member.worker.job_id), member.refusal
        if entry is None or refusal is None or member.worker.kind is not WorkerKind.ROLLOUT:
            return False
        return refusal.version == entry.ledger.versions.accepted

    def fault(self, member: Member) -> str:
        """What the trainer finds wrong with a worker, which is told once; empty: nothing."""
        entry = self._ledgers.active.get(member.worker.job_id)
        if entry is None or member.worker.kind is not WorkerKind.ROLLOUT:
            return ""
        return entry.ledger.agreement.take_fault(member.worker.worker_id)

    async def release_held(self, job_id: str, ledger: JobLedger) -> None:
        """Let workers go on that were held at a version for an evaluation that is over."""
        self._tracker.hold(job_id, ledger.evals.held_version())

    async def restore(self, job: Job, *, held: int) -> None:
        """Restore the newest publication, and the version at which workers are held."""
        job_id = job.status.job_id
        (text,) = await self._jobs.noted(job_id, "published")
        if text:
            key = await self._jobs.weights_key(job_id)

            seeded = self._parse(job_id, json.loads(text))
            self._tracker.announce(job_id, seeded, key=key, held=held)

    def _parse(self, job_id: str, note: dict[str, Any]) -> SeededVersion:
        version = PolicyVersion(**note["version"])
        if "seeds" not in note:  # written by a release with a single seed
            chunk_bytes = self._tracker.chunk_bytes(job_id, version.num_bytes)
            return SeededVersion(version, chunk_bytes, (ChunkSource(note["source"]),))
        seeds = tuple(ChunkSource(**seed) for seed in note["seeds"])
        return SeededVersion(version, int(note["chunk_bytes"]), seeds, note["site"])

    async def close(self) -> None:
        """Wait for exports to finish."""
        await asyncio.gather(*self._exports)

    async def _export_up_to(self, job_id: str, step: int) -> None:
        try:
            await self._export(job_id, name=f"step-{step:06d}", before_step=step)
        except (PacelineError, OSError) as error:
            log.warning("trajectories not written", job=job_id, step=step, error=error)
