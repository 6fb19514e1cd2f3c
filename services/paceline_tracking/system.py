"""Polls the load of a job's workers, and buffers it until a tracker takes it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.plugins import TrackedPoint
from paceline_tracking.history import HistoryReader
from paceline_tracking.points import Rates

MOST = 512  # buffered while a tracker is away; the oldest are dropped
log = Log("system")


class System:
    """System points of one job for one tracker."""

    def __init__(
        self,
        *,
        ledger: HistoryReader,
        job_id: str,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._job_id = job_id
        self._period_s = period_s
        self._clock = clock
        self._rates = Rates()
        self._waiting: deque[TrackedPoint] = deque(maxlen=MOST)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                await self.look()
            except PacelineError as error:
                log.debug("no system point", job=self._job_id, error=error)
            await asyncio.sleep(self._period_s)

    async def look(self) -> None:
        """Buffer one point; none if the job is over."""
        live = await self._ledger.live(self._job_id)
        if not live:
            return
        workers = await self._ledger.workers(self._job_id)
        values = self._rates.system(live, workers, now_s=self._clock())
        self._waiting.append(TrackedPoint("system", -1, live.step, live.version, values))

    def take(self) -> list[TrackedPoint]:
        """Return all buffered points, and clear the buffer."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken
