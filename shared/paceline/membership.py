"""A process's place in the roster: joins, beats every second, joins again when forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline import wire
from paceline.errors import NotFoundError, PacelineError
from paceline.logs import Log
from paceline.rpc import call
from paceline.types import Worker
from paceline.v1 import roster_pb2 as pb
from paceline.weights.route import TransferProgress
from paceline.weights.wire import progress_to

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

log = Log("membership")
Report = Callable[[], Worker]


class Membership:
    """Keeps one worker in the roster.

    `report` gives its current endpoint, version and load, `progress` the weights that it can serve
    to peers, whole or in part.
    """

    def __init__(
        self,
        *,
        roster: RosterAsyncStub,
        report: Report,
        progress: Callable[[], Sequence[TransferProgress]] = tuple,
        period_s: float = 1.0,
    ) -> None:
        self._roster = roster
        self._report = report
        self._progress = progress
        self._period_s = period_s

    async def run(self) -> None:
        """Join and beat until cancelled; an experience service that is away is waited for."""
        joined = False
        while True:
            try:
                if not joined:
                    await self.join()
                    joined = True
                await self.beat()
            except NotFoundError:
                joined = False
                await asyncio.sleep(min(0.1, self._period_s))
                continue
            except PacelineError as error:
                log.warning("no beat", error=error)
            await asyncio.sleep(self._period_s)

    async def join(self) -> None:
        """Enter the roster, or update what it knows."""
        request = pb.JoinRequest(worker=wire.worker_to(self._report()))
        await call(self._roster.Join, request, timeout_s=10.0, idempotent=True)

    async def beat(self) -> None:
        """Say that this worker lives, how loaded it is and what it serves.

        Raises:
            NotFoundError: the roster has forgotten this worker; join again.
        """
        worker, transfers = self._report(), self._progress()
        request = pb.BeatRequest(
            worker_id=worker.worker_id,
            active_version=worker.active_version,
            load=worker.load,
            held_versions=[each.version for each in transfers],
            transfers=map(progress_to, transfers),
        )
        await call(self._roster.Beat, request, timeout_s=5.0)

    async def leave(self) -> None:
        """Go, so that nobody sends work here any more."""
        request = pb.LeaveRequest(worker_id=self._report().worker_id)
        try:
            await call(self._roster.Leave, request, timeout_s=2.0)
        except PacelineError as error:
            log.warning("cannot leave", error=error)
