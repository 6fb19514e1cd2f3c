"""Differences of the chunks of a snapshot against another one, each made once for all readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from paceline.weights import delta
from paceline.weights.staging import Staging

_AHEAD = 3
_FRUITLESS = 8  # so many chunks on end are not smaller as differences: no more of them are tried


class Encoder:
    """Makes differences a few chunks ahead of the reader; `observe` is told the seconds of each."""

    def __init__(
        self, staging: Staging, base: Staging, *, observe: Callable[[float], None]
    ) -> None:
        self.base = base
        self._staging = staging
        self._base_version = base.header.version
        self._observe = observe
        self._sizes = delta.item_sizes(staging.header)
        self._working: dict[int, asyncio.Task[None]] = {}
        self._num_fruitless = 0

    def begin(self, indices: Iterable[int]) -> None:
        """These ready chunks will be asked for soon."""
        if self._num_fruitless >= _FRUITLESS:
            return
        for index, _ in zip(indices, range(_AHEAD), strict=False):
            if index not in self._working and not self._known(index):
                self._working[index] = asyncio.create_task(self._encode(index), name="encode")

    async def get(self, index: int) -> bytes | None:
        """The difference of a ready chunk; None if it is not smaller than the chunk."""
        self.begin([index])
        if index in self._working:
            # Readers share the work, so none of them may take it along when it goes.
            await asyncio.shield(self._working[index])
        return self._staging.delta(index, self._base_version)

    def _known(self, index: int) -> bool:
        return self._staging.has_delta(index, self._base_version)

    async def _encode(self, index: int) -> None:
        try:
            started_s = time.monotonic()
            made = await asyncio.to_thread(
                _encode,
                self._staging.slot(index),
                self.base.beside(self._staging, index),
                self._sizes[index],
            )
            self._observe(time.monotonic() - started_s)
            self._num_fruitless = 0 if made is not None else self._num_fruitless + 1
            self._staging.keep_delta(index, self._base_version, made)
        finally:
            del self._working[index]


def _encode(new: memoryview, base: memoryview, item_bytes: int) -> bytes | None:
    return delta.encode(new, base, item_bytes=item_bytes)
