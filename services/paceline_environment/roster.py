"""Watches the live workers of one kind; reconnects when the stream breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.enums import WorkerKind
from paceline.errors import PacelineError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import backoff_s, stream
from paceline.types import Worker
from paceline.v1 import roster_pb2 as pb

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

log = Log("roster")
_WATCH_S = 3600.0


class WorkerWatch:
    """The live workers of a kind at a site; the last known ones while experience is unreachable."""

    def __init__(self, *, roster: RosterAsyncStub, kind: WorkerKind, site: str = "") -> None:
        self._roster = roster
        self._kind = kind
        self._site = site
        self._workers: list[Worker] = []
        self._changed = asyncio.Event()
        self.listeners: list[Callable[[], None]] = []  # called after every change

    def all(self) -> list[Worker]:
        """Workers of all jobs."""
        return self._workers

    def of(self, job_id: str) -> list[Worker]:
        """Workers that serve a job: its own, else the shared ones."""
        own = [worker for worker in self._workers if worker.job_id == job_id]
        return own or [worker for worker in self._workers if not worker.job_id]

    async def change(self, timeout_s: float) -> None:
        """Wait for the next change, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def set(self, workers: list[Worker]) -> None:
        """Replace the workers and call the listeners."""
        self._workers = [worker for worker in workers if worker.endpoint]
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self.listeners:
            listener()

    async def run(self) -> None:
        """Watch until cancelled."""
        attempt = 0
        request = pb.ListWorkersRequest(kind=wire.number_of(self._kind), site=self._site)
        while True:
            try:
                replies = stream(self._roster.WatchWorkers, request, timeout_s=_WATCH_S)
                async for reply in replies:
                    attempt = 0
                    self.set([wire.from_proto(worker, Worker) for worker in reply.workers])
            except PacelineError as error:
                log.warning("roster watch lost", kind=self._kind, error=error)
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1
