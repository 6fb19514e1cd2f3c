"""Generates turns on rollout workers; fails over to another worker when one is lost.

Tokens that have arrived are kept: the next worker continues after them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from grpc import aio

from paceline.enums import FinishReason
from paceline.errors import DeadlineError, InvalidError, PacelineError, VersionGoneError
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.linger import Linger, at_once
from paceline.platform.transport.rpc import backoff_s, call
from paceline.types import Worker
from paceline.v1 import rollout_pb2 as pb
from paceline.v1.rollout_pb2_grpc import RolloutStub
from paceline_environment.rollouts.link import RolloutStream
from paceline_environment.rollouts.router import RolloutRouter
from paceline_environment.rollouts.turn import Turn, TurnEnd
from paceline_environment.stages import Stages

log = Log("policy")
_MAX_FAULTS = 3  # per turn, from engines that answer but are broken
_MIN_TIMEOUT_S = 0.001  # on the wire, 0 means no time limit
_RETRY_ELSEWHERE = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED", ""}


class PolicyClient:
    """Client of all rollout workers; keeps one stream to each."""

    def __init__(
        self,
        *,
        router: RolloutRouter,
        connect: Callable[[str], aio.Channel],
        stages: Stages,
        metrics: Metrics,
        linger: Linger = at_once,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._connect = connect
        self._stages = stages
        self._metrics = metrics
        self._linger = linger
        self._clock = clock
        self._links: dict[str, RolloutStream] = {}
        self._engines: dict[str, tuple[str, str]] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def generate(self, turn: Turn) -> FinishReason:
        """Generate a turn; returns its finish reason, `STOP` or `LENGTH`.

        Raises:
            VersionGoneError: no worker will serve the pinned version.
            InvalidError: an engine refuses the request.
            DeadlineError: no worker finished it within `turn.timeout_s`.
            PacelineError: engines failed repeatedly.
        """
        deadline = self._clock() + turn.timeout_s
        avoid: set[str] = set()
        faults = attempt = 0
        while not (reason := turn.finished()):
            slot = self._router.acquire_now(turn, avoid=avoid)
            if slot is None:
                with turn.span.child("room"), self._stages.waits_on(self._router.awaited(turn)):
                    slot = await self._router.acquire(turn, avoid=avoid, deadline=deadline)
            worker = slot.candidate.worker
            try:
                with self._stages.waits_on("rollout"):
                    ending = await self._ask(worker, turn, deadline)
                if ending.code == "UNAVAILABLE":
                    self._router.mark_unreachable(slot.candidate)
            finally:
                self._router.release(slot)
            if ending.reason in (FinishReason.STOP, FinishReason.LENGTH):
                return ending.reason
            faults += self._fault(worker, turn, ending)
            if faults >= _MAX_FAULTS:
                raise PacelineError(f"{worker.worker_id}: {ending.code}: {ending.text}")
            avoid = avoid | {worker.worker_id}
            with turn.span.child("backoff"):
                await asyncio.sleep(backoff_s(attempt, base_s=0.02))
            attempt += 1
        return reason

    def engine(self, worker_id: str) -> tuple[str, str]:
        """Engine and precision of a worker; empty until it has reported them."""
        return self._engines.get(worker_id, ("", ""))

    async def close(self) -> None:
        """Close all streams."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def _ask(self, worker: Worker, turn: Turn, deadline: float) -> TurnEnd:
        if worker.worker_id not in turn.workers:
            turn.workers.append(worker.worker_id)
        if turn.sends:
            self._stages.tokens_resumed += len(turn.tokens)
            self._metrics.add("resumed_tokens", len(turn.tokens), failed_service="rollout")
        turn.last = worker.worker_id
        left, had = max(deadline - self._clock(), _MIN_TIMEOUT_S), len(turn.tokens)
        try:
            with turn.span.child("ask", kind="client", worker=worker.worker_id) as span:
                ending = await self._link(worker).ask(turn, timeout_s=left, trace=span.sent)
                span.set(tokens=len(turn.tokens) - had, finish_reason=ending.reason)
                span.error = ending.code
                return ending
        finally:
            self._stages.tokens_received += len(turn.tokens) - had

    def _fault(self, worker: Worker, turn: Turn, ending: TurnEnd) -> bool:
        """Whether a failure counts against the turn; raises if a retry cannot help."""
        if ending.reason is FinishReason.ABORT or ending.code in _RETRY_ELSEWHERE:
            return False
        if ending.code == "INVALID_ARGUMENT":
            raise InvalidError(ending.text)
        if ending.code == "DEADLINE_EXCEEDED":
            raise DeadlineError(ending.text)
        if ending.code == "FAILED_PRECONDITION" and turn.pinned_version < 0:
            return False  # its weights are older than those in the roster
        gone = ending.code == "FAILED_PRECONDITION"
        if gone and not self._router.has_others(turn, worker.worker_id):
            raise VersionGoneError(ending.text)
        log.warning(
            "generation failed", rollout=worker.worker_id, code=ending.code, error=ending.text
        )
        return True

    def _link(self, worker: Worker) -> RolloutStream:
        link = self._links.get(worker.worker_id)
        if link is None or link.dead:
            if link is not None:
                self._in_background(link.close())
            link = RolloutStream(
                worker_id=worker.worker_id,
                channel=self._connect(worker.endpoint),
                linger=self._linger,
            )
            self._links[worker.worker_id] = link
            self._in_background(self._fetch_engine(worker))
        return link

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _fetch_engine(self, worker: Worker) -> None:
        """Read from a worker which engine it runs."""
        channel = self._connect(worker.endpoint)
        try:
            stub = RolloutStub(channel)
            status = await call(stub.Status, pb.RolloutStatusRequest(), timeout_s=10.0)
            self._engines[worker.worker_id] = (status.engine, status.precision)
        except PacelineError as error:
            log.warning("no status", rollout=worker.worker_id, error=error)
        finally:
            await channel.close()
