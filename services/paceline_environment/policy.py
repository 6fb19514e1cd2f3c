"""Picks a rollout worker for each turn and goes on elsewhere when one fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from grpc import aio

from paceline.errors import DeadlineError, InvalidError, PacelineError, VersionGoneError
from paceline.logs import Log
from paceline.rpc import backoff_s, call
from paceline.types import Worker
from paceline.v1 import rollout_pb2 as pb
from paceline.v1.rollout_pb2_grpc import RolloutStub
from paceline_environment.link import Link
from paceline_environment.roster import Workers
from paceline_environment.turn import Ending, Turn

log = Log("policy")
_MOST_FAULTS = 3  # answers of an engine that is alive but broken, for one turn
_ELSEWHERE = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED", ""}


class Policy:
    """All rollout workers that this process talks to."""

    def __init__(
        self,
        *,
        workers: Workers,
        connect: Callable[[str], aio.Channel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._connect = connect
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._engines: dict[str, tuple[str, str]] = {}
        self._aside: set[asyncio.Task[None]] = set()

    async def generate(self, turn: Turn) -> str:
        """Let the policy speak; the finish reason, `stop` or `length`.

        Raises:
            VersionGoneError: no worker will serve the pinned version.
            InvalidError: an engine refuses the request.
            DeadlineError: nobody could finish it within `turn.timeout_s`.
            PacelineError: engines failed repeatedly.
        """
        deadline = self._clock() + turn.timeout_s
        avoid: set[str] = set()
        faults = attempt = 0
        while not (reason := turn.finished()):
            worker = await self._pick(turn, avoid, deadline)
            ending = await self._ask(worker, turn)
            if ending.reason in ("stop", "length"):
                return ending.reason
            faults += self._fault(worker, turn, ending)
            if faults >= _MOST_FAULTS:
                raise PacelineError(f"{worker.worker_id}: {ending.code}: {ending.text}")
            avoid = avoid | {worker.worker_id}
            await asyncio.sleep(backoff_s(attempt, base_s=0.02))
            attempt += 1
        return reason

    def engine(self, worker_id: str) -> tuple[str, str]:
        """Engine and precision of a worker, as far as it has told."""
        return self._engines.get(worker_id, ("", ""))

    async def close(self) -> None:
        """Hang up everywhere."""
        for task in self._aside:
            task.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def _ask(self, worker: Worker, turn: Turn) -> Ending:
        if worker.worker_id not in turn.workers:
            turn.workers.append(worker.worker_id)
        turn.home.worker_id = worker.worker_id
        return await self._link(worker).ask(turn)

    async def _pick(self, turn: Turn, avoid: set[str], deadline: float) -> Worker:
        """A worker for a turn; waits for one while there is none."""
        while True:
            found = self._candidates(turn)
            fresh = [worker for worker in found if worker.worker_id not in avoid]
            if chosen := (fresh or found):
                home = turn.home.worker_id
                sticky = [worker for worker in chosen if worker.worker_id == home]
                return sticky[0] if sticky else min(chosen, key=self._rank)
            left = deadline - self._clock()
            if left <= 0:
                raise DeadlineError(f"no rollout worker of job {turn.job_id} within its time")
            await self._workers.change(min(left, 5.0))

    def _candidates(self, turn: Turn) -> list[Worker]:
        workers = [w for w in self._workers.of(turn.job_id) if w.active_version >= 0]
        if turn.pinned_version < 0:
            return [w for w in workers if w.active_version >= turn.min_version]
        now = [w for w in workers if w.active_version == turn.pinned_version]
        soon = [w for w in workers if w.active_version < turn.pinned_version]
        if workers and not now and not soon:
            raise VersionGoneError(f"no rollout worker serves version {turn.pinned_version}")
        return now or soon

    def _rank(self, worker: Worker) -> tuple[int, float]:
        link = self._links.get(worker.worker_id)
        told = worker.load.get("running", 0.0) + worker.load.get("waiting", 0.0)
        return (link.load if link else 0, told)

    def _fault(self, worker: Worker, turn: Turn, ending: Ending) -> bool:
        """Whether a failure counts against the turn; raises where trying again is no use."""
        if ending.reason == "abort" or ending.code in _ELSEWHERE:
            return False
        if ending.code == "INVALID_ARGUMENT":
            raise InvalidError(ending.text)
        if ending.code == "DEADLINE_EXCEEDED":
            raise DeadlineError(ending.text)
        if ending.code == "FAILED_PRECONDITION" and turn.pinned_version < 0:
            return False  # its weights are older than the roster said
        if ending.code == "FAILED_PRECONDITION":
            others = [w for w in self._candidates(turn) if w.worker_id != worker.worker_id]
            if not others:
                raise VersionGoneError(ending.text)
        log.warning(
            "generation failed", rollout=worker.worker_id, code=ending.code, error=ending.text
        )
        return True

    def _link(self, worker: Worker) -> Link:
        link = self._links.get(worker.worker_id)
        if link is None or link.dead:
            if link is not None:
                self._later(link.close())
            link = Link(worker_id=worker.worker_id, channel=self._connect(worker.endpoint))
            self._links[worker.worker_id] = link
            self._later(self._learn(worker))
        return link

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    async def _learn(self, worker: Worker) -> None:
        """Ask a worker which engine it runs."""
        channel = self._connect(worker.endpoint)
        try:
            stub = RolloutStub(channel)
            status = await call(stub.Status, pb.RolloutStatusRequest(), timeout_s=10.0)
            self._engines[worker.worker_id] = (status.engine, status.precision)
        except PacelineError as error:
            log.warning("no status", rollout=worker.worker_id, error=error)
        finally:
            await channel.close()
