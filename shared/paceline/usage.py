"""How busy a process is and whom it waits for: what finds a bottleneck.

Waits are measured where somebody waits, so that a service that is frozen shows at those who call
it. Time in which a process itself did not run counts for nobody else: its event loop is known to
have turned at every look, and there is a look every `TICK_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from paceline.metric_names import NAMES
from paceline.metrics import Metrics

TICK_S = 0.1
LATE = 2.0  # ticks without a look from which on the loop is said to have stalled


def ran(passed_s: float) -> float:
    """How much of the time between two looks a process ran: not more than a tick if it is late."""
    return TICK_S if passed_s > LATE * TICK_S else passed_s


def nowhere(on: str) -> AbstractContextManager[None]:
    """`Usage.wait` where nobody measures."""
    return nullcontext()


class Usage:
    """The utilisation of one process, in seconds that are counted up as they pass.

    `each`: whether every one of several that wait for the same service counts (episodes of an
    environment), or they count once (calls of a server).
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        service: str,
        each: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._service = service
        self._each = each
        self._clock = clock
        self._waiting: Counter[str] = Counter()
        self._handling = 0
        self._serves = service in NAMES["handling"].services
        self._busy: Callable[[], float] | None = None
        self._in_use: Callable[[], float] | None = None
        self._last = clock()
        metrics.set("capacity", 1.0, service=service)
        metrics.add("stalled", 0.0, service=service)

    def measure_seconds(self, busy: Callable[[], float]) -> None:
        """Ask this for the seconds of capacity in use since the start."""
        self._busy = busy

    def measure_slots(self, in_use: Callable[[], float], *, capacity: float) -> None:
        """Ask this for how much is in use at the moment, of a capacity."""
        self._in_use = in_use
        self._metrics.set("capacity", capacity, service=self._service)

    @contextmanager
    def wait(self, on: str) -> Generator[None]:
        """Inside, one more thing waits for a service."""
        self.look()
        self._waiting[on] += 1
        try:
            yield
        finally:
            self.look()
            self._waiting[on] -= 1

    @contextmanager
    def handle(self) -> Generator[None]:
        """Inside, one more call of somebody is handled."""
        self.look()
        self._handling += 1
        try:
            yield
        finally:
            self.look()
            self._handling -= 1

    def waits(self, on: str) -> bool:
        """Whether anything waits for this service."""
        return self._waiting[on] > 0

    def look(self) -> None:
        """Count the time since the last look."""
        now = self._clock()
        passed, self._last = now - self._last, now
        seconds = ran(passed)
        stalled = passed - seconds
        metrics, service = self._metrics, self._service
        if stalled:
            metrics.add("stalled", stalled, service=service)
        if self._handling and self._serves:
            metrics.add("handling", passed, service=service)
        for on, count in self._waiting.items():
            if count:
                num = count if self._each else 1
                metrics.add("wait", seconds * num, service=service, on=on)

    async def watch(self) -> None:
        """Look every tick; also tell how much of the capacity is in use."""
        last, started = self._clock(), time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            self.look()
            passed, last = self._clock() - last, self._clock()
            if self._in_use is not None:
                self._metrics.add("busy", self._in_use() * passed, service=self._service)
            else:
                spent = self._busy() if self._busy else time.thread_time() - started
                self._metrics.total("busy", spent, service=self._service)
