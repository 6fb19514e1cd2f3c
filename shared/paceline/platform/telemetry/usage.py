"""Measures how busy a process is and which services it waits for, to find bottlenecks.

Waits are measured by the waiting process, so that a suspended service shows up in its callers. Time
in which the waiting process itself did not run does not count: its event loop samples the clock
every `TICK_S`, and a late sample means that it was not running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from paceline.platform.telemetry.metric_names import NAMES
from paceline.platform.telemetry.metrics import Metrics

TICK_S = 0.25
STALL_TICKS = 2.0  # ticks without a sample that count as a stall


def ran(passed_s: float) -> float:
    """How long the process ran between two samples: one tick if the second sample is late."""
    return TICK_S if passed_s > STALL_TICKS * TICK_S else passed_s


def nowhere(on: str) -> AbstractContextManager[None]:
    """A `Usage.wait` that measures nothing."""
    return nullcontext()


class _OpenBlocks:
    """Counts the open blocks of one kind and how long there were any; each block enters it.

    Both ends of a block take constant time, however many kinds there are: every episode has several
    blocks.
    """

    __slots__ = ("_clock", "_each", "_since", "_unexported", "count")

    def __init__(self, clock: Callable[[], float], *, each: bool) -> None:
        self.count = 0
        self._clock = clock
        self._each = each
        self._since = 0.0
        self._unexported = 0.0

    def __enter__(self) -> None:
        self._settle()
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self._settle()
        self.count -= 1

    def take(self) -> float:
        """Seconds since the last call; those of concurrent blocks add up if `each`."""
        self._settle()
        seconds, self._unexported = self._unexported, 0.0
        return seconds

    def _settle(self) -> None:
        now = self._clock()
        if self.count:
            passed = now - self._since
            self._unexported += passed * self.count if self._each else passed
        self._since = now


class Usage:
    """Utilisation of one process, in cumulative seconds.

    `each`: whether concurrent waits for the same service add up (episodes of an environment) or
    count once (calls of a server).
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
        self._waiting: dict[str, _OpenBlocks] = {}
        self._handling = _OpenBlocks(self._elapsed, each=False)
        self._serves = service in NAMES["handling"].services
        self._busy: Callable[[], float] | None = None
        self._in_use: Callable[[], float] | None = None
        self._last = clock()
        self._totals: dict[str, float] = {"capacity": 1.0, "busy": 0.0}
        self._ran_s = 0.0  # until `_last`, without stalls
        self._stalled_s = 0.0  # not exported yet
        metrics.set("capacity", 1.0, service=service)
        metrics.add("stalled", 0.0, service=service)

    def measure_seconds(self, busy: Callable[[], float]) -> None:
        """Measure use by `busy`, which returns the seconds in use since the start."""
        self._busy = busy

    def measure_slots(self, in_use: Callable[[], float], *, capacity: float) -> None:
        """Measure use by `in_use`, which returns how much of `capacity` is in use now."""
        self._in_use = in_use
        self._totals["capacity"] = capacity
        self._metrics.set("capacity", capacity, service=self._service)

    def wait(self, on: str) -> AbstractContextManager[None]:
        """Count a wait for a service while the context is open."""
        blocks = self._waiting.get(on)
        if blocks is None:
            blocks = self._waiting[on] = _OpenBlocks(self._ran, each=self._each)
        return blocks

    def handle(self) -> AbstractContextManager[None]:
        """Count a call as being handled while the context is open."""
        return self._handling

    def waits(self, on: str) -> bool:
        """Whether anything waits for this service."""
        blocks = self._waiting.get(on)
        return blocks is not None and blocks.count > 0

    def totals(self) -> dict[str, float]:
        """`capacity`, and what was counted so far, in seconds: `busy`, `stalled`, `wait:rollout`.

        The same as the metrics, for processes that nobody scrapes.
        """
        return dict(self._totals)

    def sample(self) -> None:
        """Account for the time since the last sample, and export all that was counted."""
        for on, blocks in self._waiting.items():
            if seconds := blocks.take():
                self._add("wait", seconds, on)
        if (seconds := self._handling.take()) and self._serves:
            self._add("handling", seconds)
        if self._stalled_s:
            self._add("stalled", self._stalled_s)
            self._stalled_s = 0.0

    def _elapsed(self) -> float:
        """The clock, after accounting for the time since the last sample of it."""
        now = self._clock()
        passed, self._last = now - self._last, now
        seconds = ran(passed)
        self._ran_s += seconds
        if seconds < passed:
            self._stalled_s += passed - seconds
        return now

    def _ran(self) -> float:
        """Seconds that the process has run."""
        self._elapsed()
        return self._ran_s

    def _add(self, name: str, seconds: float, on: str = "") -> None:
        total = f"{name}:{on}" if on else name
        self._totals[total] = self._totals.get(total, 0.0) + seconds
        more = {"waiting_on": on} if on else {}
        self._metrics.add(name, seconds, service=self._service, **more)

    async def watch(self) -> None:
        """Sample every tick, and export the capacity in use."""
        last, started = self._clock(), time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            self.sample()
            passed, last = self._clock() - last, self._clock()
            if self._in_use is not None:
                used = self._in_use() * passed
                self._totals["busy"] += used
                self._metrics.add("busy", used, service=self._service)
            else:
                spent = self._busy() if self._busy else time.thread_time() - started
                self._totals["busy"] = spent
                self._metrics.total("busy", spent, service=self._service)
