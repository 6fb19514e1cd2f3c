"""A job's clock: monotonic, whatever the clocks of machines are set to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol


class Clock(Protocol):
    """A job's clock, in seconds."""

    async def resume(self, saved_s: float) -> None:
        """Continue from a saved time (0: none was saved); later calls change nothing."""
        ...

    def now(self) -> float:
        """Seconds."""
        ...


class JobClock:
    """Starts at Redis TIME and runs on the monotonic clock of the process that owns the ledger.

    Durations of minutes, or across restarts (`stop.wall_s`, deadlines of evals and leases), must
    not jump when the clock of the store's machine is set: Redis TIME is read once in a job's
    life, and the ledger saves the job's time with the rest of its state.
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

    async def resume(self, saved_s: float) -> None:
        """Continue from a saved time (0: none was saved); later calls change nothing.

        Raises:
            StoreError: Redis was asked for its time and did not answer.
        """
        if self._offset is None:
            self._offset = (saved_s or await self._wall()) - self._monotonic()

    def now(self) -> float:
        """Seconds; only differences are meaningful."""
        assert self._offset is not None, "the ledger is not open"
        return self._monotonic() + self._offset


class HeldClock:
    """A clock that can stand still: the time that a job is paused counts for nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held_s: float | None = None
        self._lost_s = 0.0  # while it stood still

    async def resume(self, saved_s: float) -> None:
        """As `Clock.resume`."""
        await self._clock.resume(saved_s)

    def now(self) -> float:
        """Seconds; the same as long as it is held."""
        return self._clock.now() - self._lost_s if self._held_s is None else self._held_s

    def hold(self) -> None:
        """Stand still from now on."""
        if self._held_s is None:
            self._held_s = self.now()

    def go_on(self) -> None:
        """Go on from where it was held."""
        if self._held_s is not None:
            self._lost_s, self._held_s = self._clock.now() - self._held_s, None
