"""Time limits that exclude time in which this process was suspended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

_TICK_S = 0.1


class Countdown:
    """Calls `done` after `seconds` of event loop time; a suspension counts as one tick."""

    def __init__(self, seconds: float, done: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticks_left = math.ceil(seconds / _TICK_S)
        self._done = done
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def cancel(self) -> None:
        """Do not call `done`."""
        self._timer.cancel()

    def _tick(self) -> None:
        self._ticks_left -= 1
        if self._ticks_left > 0:
            self._timer = self._loop.call_later(_TICK_S, self._tick)
        else:
            self._done()


@asynccontextmanager
async def running_timeout(seconds: float) -> AsyncGenerator[None]:
    """Like `asyncio.timeout`, but counting only time in which the event loop ran."""
    async with asyncio.timeout(None) as limit:
        countdown = Countdown(seconds, lambda: limit.reschedule(0.0))
        try:
            yield
        finally:
            countdown.cancel()
