"""All rollout workers that turns can go to, and the turns that wait for room on one of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

from paceline.errors import DeadlineError, VersionGoneError
from paceline.metrics import Metrics
from paceline_environment.picking import Line, Place, eligible, pick
from paceline_environment.roster import Workers
from paceline_environment.stages import Stages
from paceline_environment.turn import Turn

_SHUN_S = 1.0  # a worker that could not be reached is left alone for so long


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """Room for a turn on a worker, from when it is found until it is given back."""

    place: Place
    tokens: int
    counts: bool  # whether it takes one of the worker's places


@dataclass(slots=True, eq=False)
class _Waiting:
    turn: Turn
    avoid: Set[str]
    found: asyncio.Future[Seat]


class Places:
    """Seats for turns. When all workers are full, turns wait here and not in the engines."""

    def __init__(
        self,
        *,
        workers: Workers,
        stages: Stages,
        metrics: Metrics,
        worth: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.queued_tokens: Counter[str] = Counter()  # of turns that wait, by job
        self._workers = workers
        self._stages = stages
        self._metrics = metrics
        self._worth = worth
        self._clock = clock
        self._chance = chance
        self._places: dict[str, Place] = {}
        self._of_job: dict[str, list[Place]] = {}
        # Pinned turns go first: a worker is held at their version until they are done.
        self._pinned: Line[_Waiting] = Line()
        self._free: Line[_Waiting] = Line()
        workers.listeners.append(self._refresh)

    async def take(self, turn: Turn, *, avoid: Set[str], deadline: float) -> Seat:
        """Room on the best worker for a turn, not on those to `avoid` if there are others.

        Raises:
            VersionGoneError: no worker will serve the pinned version.
            DeadlineError: there was none until the deadline.
        """
        waiting = _Waiting(turn, avoid, asyncio.get_running_loop().create_future())
        line = self._pinned if turn.pinned_version >= 0 else self._free
        queue = (turn.job_id, turn.pinned_version)
        line.add(queue, waiting)
        taken: Seat | None = None
        try:
            self._serve()
            if not waiting.found.done():
                self._queue(turn, 1)
                try:
                    with self._stages.wait("room"):
                        async with asyncio.timeout(deadline - self._clock()):
                            await waiting.found
                finally:
                    self._queue(turn, -1)
            taken = waiting.found.result()
            return taken
        except TimeoutError:
            raise DeadlineError(
                f"no rollout worker of job {turn.job_id} had room within its time"
            ) from None
        finally:
            line.remove(queue, waiting)
            if taken is None and _succeeded(waiting.found):
                self.leave(waiting.found.result())

    def leave(self, seat: Seat) -> None:
        """Give room back."""
        seat.place.own_open -= seat.counts
        seat.place.own_tokens -= seat.tokens
        self._serve()

    def shun(self, place: Place) -> None:
        """Prefer others for a while."""
        place.shunned_until = self._clock() + _SHUN_S
        asyncio.get_running_loop().call_later(_SHUN_S, self._serve)

    def awaited(self, turn: Turn) -> str:
        """Which service a turn waits for until it has a seat."""
        workers = self._workers.of(turn.job_id)
        if not workers:
            return "controller"  # it is to start some
        least = max(turn.min_version, turn.pinned_version, 0)
        return "rollout" if any(w.active_version >= least for w in workers) else "weights"

    def has_others(self, turn: Turn, worker_id: str) -> bool:
        """Whether another worker serves the version of a turn, or will."""
        try:
            found = self._eligible(turn, frozenset())
        except VersionGoneError:
            return False
        return any(place.worker_id != worker_id for place in found)

    def _queue(self, turn: Turn, sign: int) -> None:
        self.queued_tokens[turn.job_id] += sign * turn.weight
        if not self.queued_tokens[turn.job_id]:
            del self.queued_tokens[turn.job_id]  # jobs come and go
        self._metrics.set("queued_tokens", self.queued_tokens.total())

    def _refresh(self) -> None:
        """The roster has changed, or the load of its workers."""
        busy = {name: place for name, place in self._places.items() if place.own_tokens}
        there: dict[str, Place] = {}
        for worker in self._workers.all():
            name = worker.worker_id
            there[name] = self._places.get(name) or Place(worker)
            there[name].learn(worker)
        self._places = {**busy, **there}
        self._of_job.clear()
        self._serve()

    def _eligible(self, turn: Turn, avoid: Set[str]) -> list[Place]:
        job_id = turn.job_id
        if job_id not in self._of_job:
            workers = self._workers.of(job_id)
            self._of_job[job_id] = [self._places[worker.worker_id] for worker in workers]
        return eligible(
            self._of_job[job_id],
            pinned=turn.pinned_version,
            least=turn.min_version,
            avoid=avoid,
            now=self._clock(),
        )

    def _serve(self) -> None:
        self._pinned.serve(self._offer)
        self._free.serve(self._offer)

    def _offer(self, waiting: _Waiting) -> bool:
        """Find room for one who waits; True if it need not wait any more."""
        if waiting.found.done():
            return True
        turn = waiting.turn
        try:
            found = self._eligible(turn, waiting.avoid)
        except VersionGoneError as error:
            waiting.found.set_exception(error)
            return True
        place = pick(
            found,
            pinned=turn.pinned_version,
            held=turn.held,
            worth=self._worth,
            chance=self._chance,
        )
        if place is None:
            return False
        seat = Seat(place, turn.weight, counts=turn.pinned_version <= place.version)
        place.own_open += seat.counts
        place.own_tokens += seat.tokens
        turn.home.workers.add(place.worker_id)
        waiting.found.set_result(seat)
        return True


def _succeeded(found: asyncio.Future[Seat]) -> bool:
    return found.done() and not found.cancelled() and found.exception() is None
