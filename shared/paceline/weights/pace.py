"""A cap on bytes per second that several streams share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

_PAUSE_S = 0.05  # of each stream, when all of them take a piece
_MIN_PIECE_BYTES = 1024
_BURST_S = 0.01  # shorter pauses are saved up: timers are no finer, and cost


class Pace:
    """Delays who takes bytes so that on average no more than `bytes_per_s` are taken; 0: no cap.

    `clock` gives seconds.
    """

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._num_streams = 0
        self._free_s = 0.0  # when all that was taken has been paid for

    @property
    def piece_bytes(self) -> int:
        """How much to take at once so that no pause of any stream is long; 0: any amount."""
        if self._bytes_per_s <= 0:
            return 0
        share = self._bytes_per_s / max(self._num_streams, 1)
        return max(int(share * _PAUSE_S), _MIN_PIECE_BYTES)

    @contextmanager
    def shared(self) -> Generator[None]:
        """One more stream takes of it meanwhile."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def take(self, num_bytes: int) -> None:
        """Wait until these bytes may go."""
        if self._bytes_per_s <= 0:
            return
        now = self._clock()
        self._free_s = max(self._free_s, now) + num_bytes / self._bytes_per_s
        if self._free_s - now > _BURST_S:
            await asyncio.sleep(self._free_s - now)
