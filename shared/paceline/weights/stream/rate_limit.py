"""A cap on bytes per second that several streams share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

_MAX_PAUSE_S = 0.05  # of each stream, when all of them take a piece
_MIN_PIECE_BYTES = 1024
_BURST_S = 0.01  # shorter pauses accumulate: timers are no finer, and have a cost


class RateLimit:
    """Delays callers so that on average at most `bytes_per_s` are taken; 0: no cap.

    `clock` gives seconds.
    """

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._num_streams = 0
        self._available_s = 0.0  # when the bytes taken so far are within the rate

    @property
    def piece_bytes(self) -> int:
        """How much to take at once so that no stream pauses for long; 0: any amount."""
        if self._bytes_per_s <= 0:
            return 0
        share = self._bytes_per_s / max(self._num_streams, 1)
        return max(int(share * _MAX_PAUSE_S), _MIN_PIECE_BYTES)

    @contextmanager
    def shared(self) -> Generator[None]:
        """Count one more stream while the context is open."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def take(self, num_bytes: int) -> None:
        """Wait until this many bytes may be transferred."""
        if self._bytes_per_s <= 0:
            return
        now = self._clock()
        self._available_s = max(self._available_s, now) + num_bytes / self._bytes_per_s
        if self._available_s - now > _BURST_S:
            await asyncio.sleep(self._available_s - now)
