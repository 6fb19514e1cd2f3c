"""How busy a process is and whom it waits for: what finds a bottleneck.

Waits are measured where somebody waits, so that a service that is frozen shows at those who call
it. Time in which a process itself did not run counts for nobody else: its event loop is known to
have turned at every look, and there is a look every `TICK_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

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


class _Inside:
    """One more of something, for as long as a block lasts; the time before it is counted first."""

    __slots__ = ("_count", "_counts", "_name")

    def __init__(self, count: Callable[[], None], counts: Counter[str], name: str) -> None:
        self._count = count
        self._counts = counts
        self._name = name

    def __enter__(self) -> None:
        self._count()
        self._counts[self._name] += 1

    def __exit__(self, *_: object) -> None:
        self._count()
        self._counts[self._name] -= 1


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
        self._handling: Counter[str] = Counter()
        self._seconds: dict[tuple[str, str], float] = {}  # of a metric, on a service: not told yet
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

    def wait(self, on: str) -> AbstractContextManager[None]:
        """Inside, one more thing waits for a service."""
        return _Inside(self.count, self._waiting, on)

    def handle(self) -> AbstractContextManager[None]:
        """Inside, one more call of somebody is handled."""
        return _Inside(self.count, self._handling, "")

    def waits(self, on: str) -> bool:
        """Whether anything waits for this service."""
        return self._waiting[on] > 0

    def look(self) -> None:
        """Count the time since the last look, and tell all that was counted."""
        self.count()
        for (name, on), seconds in self._seconds.items():
            more = {"on": on} if on else {}
            self._metrics.add(name, seconds, service=self._service, **more)
        self._seconds.clear()

    def count(self) -> None:
        """Count the time since the last look; every wait does at both of its ends."""
        now = self._clock()
        passed, self._last = now - self._last, now
        seconds = ran(passed)
        stalled = passed - seconds
        if stalled:
            self._add("stalled", "", stalled)
        if self._handling[""] and self._serves:
            self._add("handling", "", passed)
        for on, count in self._waiting.items():
            if count:
                self._add("wait", on, seconds * count if self._each else seconds)

    def _add(self, name: str, on: str, seconds: float) -> None:
        key = (name, on)
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds

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
