"""Scores episodes on reward workers: batched, and retried on another worker on failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from grpc import aio

from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.linger import Linger, at_once
from paceline.platform.transport.rpc import backoff_s, call
from paceline.types import Score, Worker
from paceline.v1 import reward_pb2 as pb
from paceline.v1.reward_pb2_grpc import RewardStub
from paceline_environment.coalesce import Coalescer, portions
from paceline_environment.roster import WorkerWatch

log = Log("scoring")
MAX_ITEMS = 256  # per call
_MAX_BYTES = 8 << 20  # per message, well below the limit of gRPC


@dataclass(frozen=True, slots=True)
class _JobQueue:
    job_id: str
    tenant: str
    rewards: str  # JSON of the `reward:` section
    code: str  # digest of the job's code
    timeout_s: float  # of one call


@dataclass(slots=True)
class _PendingScore:
    item: pb.ScoreItem
    score: asyncio.Future[Score]


class Scoring:
    """Client of all reward workers."""

    def __init__(
        self,
        *,
        workers: WorkerWatch,
        connect: Callable[[str], aio.Channel],
        timeout_s: float,
        linger: Linger = at_once,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._linger = linger
        self._connect = connect
        self._timeout_s = timeout_s
        self._clock = clock
        self._channels: dict[str, aio.Channel] = {}
        self._pending: dict[str, int] = {}
        self._jobs: dict[str, Coalescer[_PendingScore]] = {}

    async def score(
        self,
        *,
        job_id: str,
        rewards: str,
        item: pb.ScoreItem,
        tenant: str = "",
        code: str = "",
        part_s: float = 0.0,
    ) -> Score:
        """The score of one episode; `rewards` is the job's `reward:` section as JSON.

        Its slowest part may take `part_s`, which is added to the timeout of a call.

        Raises:
            PacelineError: no reward worker has answered in time.
        """
        if job_id not in self._jobs:
            job = _JobQueue(job_id, tenant, rewards, code, self._timeout_s + part_s)

            async def send(items: list[_PendingScore]) -> None:
                parts = portions(items, size=lambda x: x.item.ByteSize(), max_size=_MAX_BYTES)
                await asyncio.gather(*(self._send(job, part) for part in parts))

            self._jobs[job_id] = Coalescer(send, linger=self._linger, max_items=MAX_ITEMS)
        waiting = _PendingScore(item, asyncio.get_running_loop().create_future())
        self._jobs[job_id].put(waiting)
        return await waiting.score

    async def close(self) -> None:
        """Cancel pending scores and close all channels."""
        for job in self._jobs.values():
            job.close()
        for channel in self._channels.values():
            await channel.close()

    def awaited(self, job_id: str) -> str:
        """The service that a score waits for: the controller if it has to start a worker first."""
        return "reward" if self._workers.of(job_id) else "controller"

    async def _send(self, job: _JobQueue, batch: list[_PendingScore]) -> None:
        batch = [waiting for waiting in batch if not waiting.score.done()]
        request = pb.ScoreRequest(
            job_id=job.job_id,
            tenant=job.tenant,
            rewards_json=job.rewards,
            code=job.code,
            items=[waiting.item for waiting in batch],
        )
        try:
            reply = await self._call(request, job.timeout_s)
        except PacelineError as error:
            for waiting in batch:
                if not waiting.score.done():
                    waiting.score.set_exception(error)
            return
        for waiting, message in zip(batch, reply.scores, strict=True):
            if waiting.score.done():
                continue
            try:
                waiting.score.set_result(wire.from_proto(message, Score))
            except ValueError as error:
                waiting.score.set_exception(PacelineError(f"score: {error}"))

    async def _call(self, request: pb.ScoreRequest, timeout_s: float) -> pb.ScoreReply:
        """Call workers until one answers, for 2 `timeout_s` in all: one of them may hang."""
        deadline = self._clock() + 2 * timeout_s
        last: PacelineError = UnavailableError("no reward worker is available")
        avoid: set[str] = set()
        attempt = 0
        while (left := deadline - self._clock()) > 0:
            worker = self._pick(request.job_id, avoid)
            if worker is None:
                await self._workers.change(min(left, 1.0))
                continue
            try:
                reply = await self._try(worker, request, min(left, timeout_s))
                if attempt:
                    scored = len(request.items)
                    log.info("scoring failed over", reward=worker.worker_id, episodes=scored)
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
        """The least busy worker; one that has failed is retried only if there is no other."""
        workers = self._workers.of(job_id)
        fresh = [worker for worker in workers if worker.worker_id not in avoid]
        return min(fresh or workers, key=self._rank, default=None)

    def _rank(self, worker: Worker) -> tuple[int, float]:
        return (self._pending.get(worker.worker_id, 0), worker.load.get("pending", 0.0))
