"""Scores episodes at a reward worker: many in one call, elsewhere when one fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from grpc import aio

from paceline import wire
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.logs import Log
from paceline.rpc import backoff_s, call
from paceline.types import Score, Worker
from paceline.v1 import reward_pb2 as pb
from paceline.v1.reward_pb2_grpc import RewardStub
from paceline_environment.coalesce import Coalescer, portions
from paceline_environment.roster import Workers

log = Log("scoring")
_WINDOW_S = 0.004
_MOST_ITEMS = 256
_MOST_BYTES = 8 << 20  # of one message, well below the limit of gRPC


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: str
    tenant: str
    rewards: str  # JSON of the `reward:` section
    limit_s: float  # of an answer


@dataclass(slots=True)
class _Waiting:
    item: pb.ScoreItem
    score: asyncio.Future[Score]


class Scoring:
    """All reward workers that this process talks to."""

    def __init__(
        self,
        *,
        workers: Workers,
        connect: Callable[[str], aio.Channel],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._connect = connect
        self._timeout_s = timeout_s
        self._clock = clock
        self._channels: dict[str, aio.Channel] = {}
        self._pending: dict[str, int] = {}
        self._jobs: dict[str, Coalescer[_Waiting]] = {}

    async def score(
        self,
        *,
        job_id: str,
        rewards: str,
        item: pb.ScoreItem,
        tenant: str = "",
        part_s: float = 0.0,
    ) -> Score:
        """The score of one episode; `rewards` is the job's `reward:` section as JSON.

        One of its parts may take `part_s`; an answer may take so much longer.

        Raises:
            PacelineError: no reward worker could be made to answer.
        """
        if job_id not in self._jobs:
            job = _Job(job_id, tenant, rewards, self._timeout_s + part_s)

            async def send(items: list[_Waiting]) -> None:
                parts = portions(items, size=lambda each: each.item.ByteSize(), most=_MOST_BYTES)
                await asyncio.gather(*(self._send(job, part) for part in parts))

            self._jobs[job_id] = Coalescer(send, window_s=_WINDOW_S, most=_MOST_ITEMS)
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._jobs[job_id].put(waiting)
        return await waiting.score

    async def close(self) -> None:
        """Let go of all channels."""
        for job in self._jobs.values():
            job.close()
        for channel in self._channels.values():
            await channel.close()

    def awaited(self, job_id: str) -> str:
        """Which service a score waits for: who is to start a worker, if there is none."""
        return "reward" if self._workers.of(job_id) else "controller"

    async def _send(self, job: _Job, batch: list[_Waiting]) -> None:
        batch = [waiting for waiting in batch if not waiting.score.done()]
        request = pb.ScoreRequest(
            job_id=job.job_id,
            tenant=job.tenant,
            rewards_json=job.rewards,
            items=[waiting.item for waiting in batch],
        )
        try:
            reply = await self._call(request, job.limit_s)
        except PacelineError as error:
            for waiting in batch:
                if not waiting.score.done():
                    waiting.score.set_exception(error)
            return
        for waiting, message in zip(batch, reply.scores, strict=True):
            if waiting.score.done():
                continue
            try:
                waiting.score.set_result(wire.score_from(message))
            except ValueError as error:
                waiting.score.set_exception(PacelineError(f"score: {error}"))

    async def _call(self, request: pb.ScoreRequest, limit_s: float) -> pb.ScoreReply:
        """Two full tries' time in all: a worker that hangs must not be the end."""
        deadline = self._clock() + 2 * limit_s
        last: PacelineError = UnavailableError("no reward worker is there")
        avoid: set[str] = set()
        attempt = 0
        while (left := deadline - self._clock()) > 0:
            worker = self._pick(request.job_id, avoid)
            if worker is None:
                await self._workers.change(min(left, 1.0))
                continue
            try:
                reply = await self._try(worker, request, min(left, limit_s))
                if attempt:
                    scored = len(request.items)
                    log.info("scored elsewhere", reward=worker.worker_id, episodes=scored)
                return reply
            except InvalidError:  # every worker would refuse it
                raise
            except PacelineError as error:
                last = error
                log.warning("scoring failed", reward=worker.worker_id, error=error)
            avoid.add(worker.worker_id)
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1
        raise last

    async def _try(
        self, worker: Worker, request: pb.ScoreRequest, timeout_s: float
    ) -> pb.ScoreReply:
        channel = self._channels.get(worker.endpoint)
        if channel is None:
            channel = self._channels[worker.endpoint] = self._connect(worker.endpoint)
        stub = RewardStub(channel)
        size = len(request.items)
        self._pending[worker.worker_id] = self._pending.get(worker.worker_id, 0) + size
        try:
            reply = await call(stub.Score, request, timeout_s=timeout_s)
        finally:
            self._pending[worker.worker_id] -= size
        if len(reply.scores) != size:
            raise PacelineError(
                f"{worker.worker_id} answered {size} items with {len(reply.scores)} scores"
            )
        return reply

    def _pick(self, job_id: str, avoid: set[str]) -> Worker | None:
        """The least busy one; one that failed is tried again only when no other is left."""
        found = self._workers.of(job_id)
        fresh = [worker for worker in found if worker.worker_id not in avoid]
        return min(fresh or found, key=self._rank, default=None)

    def _rank(self, worker: Worker) -> tuple[int, float]:
        return (self._pending.get(worker.worker_id, 0), worker.load.get("pending", 0.0))
