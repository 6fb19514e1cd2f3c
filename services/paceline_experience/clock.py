"""Time of a job: it only passes, whatever the clocks of machines are set to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol


class Clock(Protocol):
    """Time of a job in seconds."""

    async def resume(self, kept_s: float) -> None:
        """Go on from what was kept, 0: nothing was; later calls change nothing."""
        ...

    def now(self) -> float:
        """Seconds."""
        ...


class JobClock:
    """Begins at Redis TIME and is carried on by the monotonic clock of whoever keeps the ledger.

    What is measured over minutes or restarts (`stop.wall_s`, deadlines of evals and leases) must
    not jump when the clock of the store's machine is set: its TIME is asked for once in a job's
    life, and the ledger keeps the time of the job beside the rest of its state.
    """

    def __init__(
        self,
        wall: Callable[[], Awaitable[float]],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._offset: float | None = None

    async def resume(self, kept_s: float) -> None:
        """Go on from what was kept, 0: nothing was; later calls change nothing.

        Raises:
            StoreError: Redis was to be asked and does not answer.
        """
        if self._offset is None:
            self._offset = (kept_s or await self._wall()) - self._monotonic()

    def now(self) -> float:
        """Seconds; only differences mean anything."""
        assert self._offset is not None, "the ledger is not open"
        return self._monotonic() + self._offset
