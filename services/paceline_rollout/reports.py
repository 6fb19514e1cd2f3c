"""Reports weight transfers to the route planner without blocking them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import call
from paceline.v1 import roster_pb2 as pb
from paceline.weights.route import TransferReport

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

MAX_PENDING = 256  # while the planner does not answer; the oldest are dropped first
CALL_TIMEOUT_S = 5.0
log = Log("rollout")


class Reports:
    """A queue of reports; adding to it never blocks."""

    def __init__(self, roster: RosterAsyncStub, *, job_id: str) -> None:
        self._roster = roster
        self._job_id = job_id
        self._pending: deque[TransferReport] = deque(maxlen=MAX_PENDING)
        self._wake = asyncio.Event()

    def add(self, report: TransferReport) -> None:
        """Queue a report."""
        self._pending.append(report)
        self._wake.set()

    async def run(self) -> None:
        """Send until cancelled; a report that fails is dropped, as newer ones supersede it."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                request = wire.to_proto(self._pending.popleft(), pb.ReportTransferRequest)
                request.job_id = self._job_id
                try:
                    await call(self._roster.ReportTransfer, request, timeout_s=CALL_TIMEOUT_S)
                except PacelineError as error:
                    log.warning("report failed", job=self._job_id, error=error)
