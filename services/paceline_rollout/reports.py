"""Tells the tracker how transfers go, without holding them up."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.logs import Log
from paceline.rpc import call
from paceline.weights.route import TransferReport
from paceline.weights.wire import report_to

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

MOST = 256  # kept while the tracker does not answer; the oldest go first
CALL_S = 5.0
log = Log("rollout")


class Reports:
    """A queue that never blocks who adds to it."""

    def __init__(self, roster: RosterAsyncStub, *, job_id: str) -> None:
        self._roster = roster
        self._job_id = job_id
        self._waiting: deque[TransferReport] = deque(maxlen=MOST)
        self._news = asyncio.Event()

    def add(self, report: TransferReport) -> None:
        """Send it when its turn comes."""
        self._waiting.append(report)
        self._news.set()

    async def run(self) -> None:
        """Send until cancelled; what cannot be delivered is lost, for newer ones say more."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                request = report_to(self._waiting.popleft(), job_id=self._job_id)
                try:
                    await call(self._roster.ReportTransfer, request, timeout_s=CALL_S)
                except PacelineError as error:
                    log.warning("no report", job=self._job_id, error=error)
