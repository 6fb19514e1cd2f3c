"""Time limits that leave out what this process slept through: who was frozen blames nobody."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

_TICK_S = 0.1


class Countdown:
    """Calls `done` once the event loop has turned for so many seconds; a freeze is one tick."""

    def __init__(self, seconds: float, done: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = math.ceil(seconds / _TICK_S)
        self._done = done
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def cancel(self) -> None:
        """Call nobody any more."""
        self._timer.cancel()

    def _tick(self) -> None:
        self._left -= 1
        if self._left > 0:
            self._timer = self._loop.call_later(_TICK_S, self._tick)
        else:
            self._done()


@asynccontextmanager
async def at_most(seconds: float) -> AsyncGenerator[None]:
    """As `asyncio.timeout`, of time in which the event loop turned."""
    async with asyncio.timeout(None) as limit:
        countdown = Countdown(seconds, lambda: limit.reschedule(0.0))
        try:
            yield
        finally:
            countdown.cancel()
