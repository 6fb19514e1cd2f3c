"""Registers a worker in the roster: joins, sends heartbeats, and rejoins when forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from paceline.errors import NotFoundError, PacelineError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import call
from paceline.types import WeightRefusal, Worker
from paceline.v1 import roster_pb2 as pb
from paceline.v1 import types_pb2

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

log = Log("membership")
Report = Callable[[], Worker]
Ended = Callable[[str], Awaitable[None]]


_KEPT_BEATS = 10  # heartbeats from one that names kept jobs to the next


async def ignored(job_id: str) -> None:
    """For a worker that keeps nothing of a job."""


class HeldVersion(Protocol):
    """A version that a worker holds, in part or whole; has the fields of `TransferProgress`."""

    @property
    def version(self) -> int:
        """The version."""
        ...


class Membership:
    """Keeps one worker registered in the roster; joins again with another endpoint.

    `report` returns its current endpoint, version and load; `progress` returns the weights that it
    can serve to peers, complete or partial; `ended` is called with jobs that have ended lately,
    with each of them several times, and with those of `kept` that have ended at any time; `usage`
    returns `Usage.totals`. `refusal` returns what a rollout worker refuses; `at_fault` is called
    with its version if another worker serves that, and `fault` with what the trainer finds wrong
    with the tokens of this one.
    """

    def __init__(
        self,
        *,
        roster: RosterAsyncStub,
        report: Report,
        progress: Callable[[], Sequence[HeldVersion]] = tuple,
        ended: Ended = ignored,
        kept: Callable[[], Iterable[str]] = tuple,
        usage: Callable[[], Mapping[str, float]] = dict,
        refusal: Callable[[], WeightRefusal | None] = lambda: None,
        at_fault: Callable[[int], None] = lambda version: None,
        fault: Callable[[str], None] = lambda words: None,
        period_s: float = 1.0,
    ) -> None:
        self._roster = roster
        self._report = report
        self._progress = progress
        self._ended = ended
        self._kept = kept
        self._usage = usage
        self._refusal = refusal
        self._at_fault = at_fault
        self._fault = fault
        self._num_beats = 0
        self._joined: Worker | None = None
        self._period_s = period_s

    async def run(self) -> None:
        """Join and send heartbeats until cancelled, retrying while experience is unreachable."""
        while True:
            try:
                worker = self._report()
                if self._joined != _lasting(worker):
                    await self._join(worker)
                await self._beat(worker)
            except NotFoundError:
                self._joined = None
                await asyncio.sleep(min(0.1, self._period_s))
                continue
            except PacelineError as error:
                log.warning("heartbeat failed", error=error)
            await asyncio.sleep(self._period_s)

    async def join(self) -> None:
        """Join the roster, or update the entry there."""
        await self._join(self._report())

    async def _join(self, worker: Worker) -> None:
        request = pb.JoinRequest(worker=wire.to_proto(worker, types_pb2.Worker))
        await call(self._roster.Join, request, timeout_s=10.0, idempotent=True)
        self._joined = _lasting(worker)

    async def beat(self) -> None:
        """Send a heartbeat with load and served weights.

        Raises:
            NotFoundError: the roster has forgotten this worker; join again.
        """
        await self._beat(self._report())

    async def _beat(self, worker: Worker) -> None:
        transfers, refusal = self._progress(), self._refusal()
        names_kept = self._num_beats % _KEPT_BEATS == 0
        self._num_beats += 1
        request = pb.HeartbeatRequest(
            worker_id=worker.worker_id,
            active_version=worker.active_version,
            load=worker.load,
            held_versions=[transfer.version for transfer in transfers],
            transfers=[wire.to_proto(transfer, pb.TransferProgress) for transfer in transfers],
            kept_jobs=self._kept() if names_kept else (),
            usage=self._usage(),
            phases=[wire.to_proto(phase, types_pb2.WorkerPhase) for phase in worker.phases],
            refusal=None if refusal is None else wire.to_proto(refusal, pb.WeightRefusal),
        )
        reply = await call(self._roster.Heartbeat, request, timeout_s=5.0)
        for job_id in reply.ended_jobs:
            await self._ended(job_id)
        if refusal is not None and reply.at_fault:
            self._at_fault(refusal.version)
        if reply.fault:
            self._fault(reply.fault)

    async def leave(self) -> None:
        """Leave the roster, so that the worker gets no more work."""
        request = pb.LeaveRequest(worker_id=self._report().worker_id)
        try:
            await call(self._roster.Leave, request, timeout_s=2.0)
        except PacelineError as error:
            log.warning("cannot leave", error=error)


def _lasting(worker: Worker) -> Worker:
    """The worker without what its heartbeats carry."""
    return replace(worker, active_version=-1, load={}, phases=())
