"""Assigns turns to rollout workers; turns wait here for a free slot."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

from paceline.errors import DeadlineError, VersionGoneError
from paceline.platform.telemetry.metrics import Metrics
from paceline_environment.rollouts.picking import FairWaitQueue, RolloutCandidate, eligible, pick
from paceline_environment.rollouts.turn import Turn
from paceline_environment.roster import WorkerWatch
from paceline_environment.stages import Stages

_BACKOFF_S = 1.0  # a worker that could not be reached gets no turns for this long


@dataclass(slots=True, eq=False)
class RouterSlot:
    """A slot for a turn on a worker, from its assignment until its release."""

    candidate: RolloutCandidate
    tokens: int
    counts: bool  # against the worker's capacity


@dataclass(slots=True, eq=False)
class _PendingTurn:
    turn: Turn
    avoid: Set[str]
    slot: asyncio.Future[RouterSlot]


class RolloutRouter:
    """Slots for turns. When all workers are full, turns wait here and not in the engines."""

    def __init__(
        self,
        *,
        workers: WorkerWatch,
        stages: Stages,
        metrics: Metrics,
        prefix_value: float,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.queued_tokens: Counter[str] = Counter()  # of turns that wait, by job
        self._workers = workers
        self._stages = stages
        self._metrics = metrics
        self._prefix_value = prefix_value
        self._clock = clock
        self._rng = rng
        self._candidates: dict[str, RolloutCandidate] = {}
        self._by_job: dict[str, list[RolloutCandidate]] = {}
        # Pinned turns go first: a worker stays at their version until they are done.
        self._pinned: FairWaitQueue[_PendingTurn] = FairWaitQueue()
        self._unpinned: FairWaitQueue[_PendingTurn] = FairWaitQueue()
        workers.listeners.append(self._refresh)

    def acquire_now(self, turn: Turn, *, avoid: Set[str]) -> RouterSlot | None:
        """A slot if one is free and no other turn waits.

        Raises:
            VersionGoneError: no worker will serve the pinned version.
        """
        return None if self._pinned or self._unpinned else self._assign(turn, avoid)

    async def acquire(self, turn: Turn, *, avoid: Set[str], deadline: float) -> RouterSlot:
        """Acquire a slot on the best worker; on those to `avoid` only if there are no others.

        Raises:
            VersionGoneError: no worker will serve the pinned version.
            DeadlineError: none became free before the deadline.
        """
        waiting = _PendingTurn(turn, avoid, asyncio.get_running_loop().create_future())
        wait_queue = self._pinned if turn.pinned_version >= 0 else self._unpinned
        queue = (turn.job_id, turn.pinned_version)
        wait_queue.add(queue, waiting)
        acquired: RouterSlot | None = None
        try:
            self._serve()
            if not waiting.slot.done():
                self._count_queued(turn, 1)
                try:
                    with self._stages.of(turn.job_id).wait("room"):
                        async with asyncio.timeout(deadline - self._clock()):
                            await waiting.slot
                finally:
                    self._count_queued(turn, -1)
            acquired = waiting.slot.result()
            return acquired
        except TimeoutError:
            raise DeadlineError(
                f"no rollout worker of job {turn.job_id} had a free slot within its time"
            ) from None
        finally:
            wait_queue.remove(queue, waiting)
            if acquired is None and _has_result(waiting.slot):
                self.release(waiting.slot.result())

    def release(self, slot: RouterSlot) -> None:
        """Release a slot and offer it to the waiting turns."""
        slot.candidate.own_open -= slot.counts
        slot.candidate.own_tokens -= slot.tokens
        self._serve()

    def mark_unreachable(self, candidate: RolloutCandidate) -> None:
        """Avoid a worker for `_BACKOFF_S` while there are others."""
        candidate.backoff_until = self._clock() + _BACKOFF_S
        asyncio.get_running_loop().call_later(_BACKOFF_S, self._serve)

    def awaited(self, turn: Turn) -> str:
        """The service that a turn without a slot waits for."""
        workers = self._workers.of(turn.job_id)
        if not workers:
            return "controller"  # which has to start some
        min_version = max(turn.min_version, turn.pinned_version, 0)
        return "rollout" if any(w.active_version >= min_version for w in workers) else "weights"

    def has_others(self, turn: Turn, worker_id: str) -> bool:
        """Whether another worker serves the version of a turn, or will."""
        try:
            others = self._eligible(turn, frozenset())
        except VersionGoneError:
            return False
        return any(candidate.worker_id != worker_id for candidate in others)

    def _count_queued(self, turn: Turn, sign: int) -> None:
        self.queued_tokens[turn.job_id] += sign * turn.weight
        if not self.queued_tokens[turn.job_id]:
            del self.queued_tokens[turn.job_id]  # jobs come and go
        self._metrics.set("queued_tokens", self.queued_tokens.total())

    def _refresh(self) -> None:
        """Apply a change of the roster or of the load of its workers."""
        busy = {
            name: candidate for name, candidate in self._candidates.items() if candidate.own_tokens
        }
        current: dict[str, RolloutCandidate] = {}
        for worker in self._workers.all():
            name = worker.worker_id
            current[name] = self._candidates.get(name) or RolloutCandidate(worker)
            current[name].update(worker)
        self._candidates = {**busy, **current}
        self._by_job.clear()
        self._serve()

    def _eligible(self, turn: Turn, avoid: Set[str]) -> list[RolloutCandidate]:
        job_id = turn.job_id
        if job_id not in self._by_job:
            workers = self._workers.of(job_id)
            self._by_job[job_id] = [self._candidates[worker.worker_id] for worker in workers]
        return eligible(
            self._by_job[job_id],
            pinned=turn.pinned_version,
            min_version=turn.min_version,
            avoid=avoid,
            now=self._clock(),
        )

    def _serve(self) -> None:
        self._pinned.serve(self._offer)
        self._unpinned.serve(self._offer)

    def _offer(self, waiting: _PendingTurn) -> bool:
        """Try to assign a slot to a waiting turn; True if it no longer has to wait."""
        if waiting.slot.done():
            return True
        try:
            slot = self._assign(waiting.turn, waiting.avoid)
        except VersionGoneError as error:
            waiting.slot.set_exception(error)
            return True
        if slot is not None:
            waiting.slot.set_result(slot)
        return slot is not None

    def _assign(self, turn: Turn, avoid: Set[str]) -> RouterSlot | None:
        """Assign a free slot of the best worker, if there is one."""
        candidate = pick(
            self._eligible(turn, avoid),
            pinned=turn.pinned_version,
            held=turn.held,
            prefix_value=self._prefix_value,
            rng=self._rng,
        )
        if candidate is None:
            return None
        slot = RouterSlot(candidate, turn.weight, counts=turn.pinned_version <= candidate.version)
        candidate.own_open += slot.counts
        candidate.own_tokens += slot.tokens
        turn.holders.workers.add(candidate.worker_id)
        return slot


def _has_result(slot: asyncio.Future[RouterSlot]) -> bool:
    return slot.done() and not slot.cancelled() and slot.exception() is None
