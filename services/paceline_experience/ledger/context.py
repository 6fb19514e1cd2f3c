"""What all operations of the ledger share: the job's keys, state, lock and signals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config import JobSpec
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.tracing import Tracer
from paceline.types import CheckpointStatus
from paceline_experience.ledger.generation.learning import LearningPart
from paceline_experience.ledger.generation.memory import Memory
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.ledger.records import (
    HELD,
    BatchRecord,
    LedgerMeta,
    Publication,
    field_texts,
    parse_record,
)
from paceline_experience.ledger.replay.pool import Pool
from paceline_experience.ledger.state import LedgerState, parse_results
from paceline_experience.ledger.task_cursor import TaskCursor
from paceline_experience.ledger.traces import Traces
from paceline_experience.store.clock import Clock, HeldClock
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.signal import Signal
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.quotas import JobLimits

if TYPE_CHECKING:
    from paceline_experience.store.store import Store

_SAVE_CLOCK_S = 10.0  # a restart loses at most this much of the job's time
log = Log("core")


class Hooks(Protocol):
    """Callbacks from the ledger to the rest of the service."""

    async def recorded(self) -> None:
        """The history of the job may have new rows; may be called when it has none."""
        ...

    async def finished(self, *, state: str, reason: str) -> None:
        """The job is over: `succeeded` or `failed`. May be called again after a restart."""
        ...

    async def running(self) -> None:
        """The first version was published."""
        ...

    async def checkpoints(self, listed: tuple[CheckpointStatus, ...]) -> None:
        """These checkpoints exist now."""
        ...

    async def store_rolled_back(self) -> None:
        """The store has lost the most recent writes."""
        ...


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """The job of a ledger; `epoch` is that of its ownership, 0: nobody owns it."""

    job_id: str
    tenant: str
    spec: JobSpec
    epoch: int = 0


class LedgerContext:
    """Runs scripts one at a time and keeps the state in memory equal to that in Redis."""

    def __init__(
        self,
        *,
        store: Store,
        job: LedgerJob,
        clock: Clock,
        cursor: TaskCursor,
        limits: JobLimits,
        watermarks: Watermarks,
        tracer: Tracer,
        meter: JobMeter,
        learners: Sequence[LearningPart],
    ) -> None:
        self.learners = learners
        self.watermarks = watermarks
        self.meter = meter
        self.store = store
        self.keys = JobKeys(job.tenant, job.job_id)
        self.job_id = job.job_id
        self.spec = job.spec
        self.clock = HeldClock(clock)
        self.cursor = cursor
        self.limits = limits
        self.traces = Traces(tracer, job_id=job.job_id)
        self._epoch = job.epoch
        self.state = LedgerState()
        self.work = Signal()  # there may be episodes to lease
        self.ready = Signal()  # there may be a batch to take
        self._lock = asyncio.Lock()
        self._stale = True
        self.rows_written = 0  # to the history, by this object
        self._rolled_back = False  # the store was rolled back, and recovery is not complete
        self._on_rollback: Callable[[], Awaitable[None]] | None = None

    def on_rollback(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call this inside a transaction when the store is older than the state in memory."""
        self._on_rollback = callback

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[LedgerState]:
        """One writer at a time, with an up-to-date state."""
        async with self._lock:
            if self._stale:
                await self._reload()
            yield self.state

    async def compare(self) -> None:
        """Reload from the store if its revision differs from the state in memory."""
        async with self._lock:
            if not self._stale:
                found = await self.store.command("HGET", self.keys.meta, "revision")
                self._stale = int(found or 0) != self.state.revision
            if self._stale:
                await self._reload()

    async def change(self, script: str, *args: str | int | bytes) -> Any:
        """Run a script inside a transaction and return its answer.

        If the script's outcome is unknown, the state is reloaded before the next transaction.

        Raises:
            UnavailableError: another replica of this service owns the job, or the store is not at
                the revision that the caller has planned from.
        """
        self._stale = True
        revision = self.state.revision
        reply = await self.store.run(script, self.keys.scripts, *args, revision, self._epoch)
        head: dict[str, Any] = json.loads(reply[0])
        changes = self.state.apply(head, reply[1], reply[2], deadline=self.lease_end())
        self._stale = False
        self.traces.on_changes(
            changes,
            reasons=[k.partition("drop:")[2] for k in head["counts"] or {} if "drop:" in k],
            step=self.state.step,
            incarnation=self.state.meta.incarnation,
        )
        return head["answer"]

    def num_leased(self) -> int:
        """Training episodes that workers have, as of the last change."""
        return self.state.counts["leased"]

    async def listed_payloads(self) -> set[str]:
        """Payloads of trained or measured trajectories that can still be listed."""
        names = set[str]()
        for ring in (self.keys.ring, self.keys.eval_ring, self.keys.samples):
            found: list[bytes] = await self.store.command("ZRANGE", ring, 0, -1)
            names.update(name.decode() for name in found)
        return names

    def lease_end(self) -> float:
        """When a lease granted or renewed at this moment expires, on the job's clock."""
        return self.clock.now() + self.spec.experience.lease_s

    async def decide(self, decisions: Sequence[Mapping[str, object]]) -> None:
        """Inside a transaction: do what was decided on groups, as `decide.lua` takes it."""
        await self.change("decide", json.dumps(decisions))

    async def note(self, **fields: object) -> None:
        """Inside a transaction: set fields of `LedgerMeta`."""
        await self.change("note", json.dumps(field_texts(**fields)))

    async def save_clock(self) -> None:
        """Save the job's clock, at most every 10 s, so that a restart continues from it."""
        async with self.transaction() as state:
            now = self.clock.now()
            if now - state.meta.clock >= _SAVE_CLOCK_S:
                await self.note(clock=now)

    def learned(self, memory: Memory) -> None:
        """Plug-ins that learn continue with this memory, which is written."""
        for each in self.learners:
            each.remember(memory)

    def reported(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The trainer's metrics of a step, or only their size if they exceed the limit."""
        num_bytes = len(json.dumps(metrics).encode())
        if problem := self.limits.excess("metrics_bytes", num_bytes):
            log.warning("metrics of a step are too large", job=self.job_id, error=problem)
            return {"oversized_bytes": num_bytes}
        return metrics

    @property
    def problem(self) -> str:
        """Why no task can be drawn any more, so that the job fails; empty: they can."""
        problems = [self.cursor.problem, *(each.problem for each in self.learners)]
        return next(filter(None, problems), "")

    def invalidate(self) -> None:
        """Reload the state before the next transaction."""
        self._stale = True

    async def _reload(self) -> None:
        known = self.state.revision
        await self._load()
        lost = known - self.state.revision
        if lost > 0:
            self._rolled_back = True
            self.meter.store_rolled_back()
            log.error(
                "the store has lost its most recent writes; continuing from what it holds",
                job=self.job_id,
                step=self.state.step,
                version=self.state.version,
                writes_lost=lost,
            )
        if self._rolled_back and self._on_rollback is not None:
            try:
                await self._on_rollback()
            finally:
                # A change inside clears the flag; after an error all of this must be repeated.
                self._stale = True
        self._rolled_back = self._stale = False

    async def _load(self) -> None:
        keys = self.keys
        names = (keys.counts, keys.meta, keys.groups, keys.results, keys.batches, keys.versions)
        counts, meta, groups, results, batches, versions = await self.store.hashes(*names)
        old, state = self.state, LedgerState()
        state.counts.update({k.decode(): int(v) for k, v in counts.items()})
        texts = {k.decode(): v.decode() for k, v in meta.items()}
        state.revision = int(texts.pop("revision", 0))
        state.meta = LedgerMeta().changed(texts)
        state.batches.update({int(k): parse_record(BatchRecord, v) for k, v in batches.items()})
        state.versions.update({int(k): parse_record(Publication, v) for k, v in versions.items()})
        if self.spec.experience.replay is not None:
            (stored,) = await self.store.hashes(keys.replay)
            state.pool = Pool(stored, unfixed=state.unfixed_step())
            state.unpinned = old.unpinned | old.pool.payloads | {*old.pins}
        await self.clock.resume(state.meta.clock)
        if state.meta.paused == HELD:
            self.clock.hold()
        else:
            self.clock.go_on()
        found = parse_results(results.keys(), results.values())
        for key, text in groups.items():
            name = key.decode()
            before = old.groups.get(name)
            state.enter(name, text, found, before=before, deadline=self.lease_end())
        if self.learners:
            self.learned(Memory(*await self.store.hashes(keys.memory)))
        self.cursor.load(state.meta.feed)
        self.state = state
        self._stale = False
