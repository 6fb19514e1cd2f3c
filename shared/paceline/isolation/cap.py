"""A cap on the processes of a service over all jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from paceline.platform.fair_queue import FairQueue, QueueOwner

Release = Callable[[], None]


async def nothing(owner: QueueOwner) -> None:
    """For a worker that can end no process before its time."""


class ProcessCap:
    """Grants places for processes; of jobs that wait, the one with the fewest is next."""

    def __init__(
        self,
        most: int,
        *,
        on_waiting: Callable[[int], object] = lambda num: None,
        make_room: Callable[[QueueOwner], Awaitable[None]] = nothing,
    ) -> None:
        """`on_waiting` hears how many wait whenever that changes.

        `make_room` may end processes of others for an owner that is about to wait.
        """
        self._queue = FairQueue(most)
        self._on_waiting = on_waiting
        self._make_room = make_room
        self._taken = 0
        self._waiting = 0

    @property
    def full(self) -> bool:
        """Whether the next one would have to wait."""
        return self._taken + self._waiting >= self._queue.slots

    @property
    def wanted(self) -> bool:
        """Whether some job waits."""
        return self._waiting > 0

    async def take(self, owner: QueueOwner) -> Release:
        """Wait for a place; returns what gives it back, which does nothing when called again."""
        full = self.full
        self._count(waiting=1)
        try:
            if full:
                await self._make_room(owner)
            await self._queue.acquire(owner)
        finally:
            self._count(waiting=-1)
        self._count(taken=1)
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._count(taken=-1)
                self._queue.release(owner)

        return release

    def _count(self, *, taken: int = 0, waiting: int = 0) -> None:
        self._taken += taken
        self._waiting += waiting
        self._on_waiting(self._waiting)
