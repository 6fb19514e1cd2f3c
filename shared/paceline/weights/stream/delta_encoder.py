"""Encodes the chunks of a snapshot as deltas against another snapshot, once for all readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from paceline.weights.snapshot import delta
from paceline.weights.snapshot.staging import Staging

_LOOKAHEAD = 3
_MAX_INCOMPRESSIBLE = 8  # consecutive chunks without a smaller delta, before encoding stops


class Encoder:
    """Encodes deltas a few chunks ahead of the reader; passes the seconds of each to `observe`."""

    def __init__(
        self, staging: Staging, base: Staging, *, observe: Callable[[float], None]
    ) -> None:
        self.base = base
        self._staging = staging
        self._base_version = base.header.version
        self._observe = observe
        self._sizes = delta.item_sizes(staging.header)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._num_incompressible = 0

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start encoding ready chunks that will be requested soon."""
        if self._num_incompressible >= _MAX_INCOMPRESSIBLE:
            return
        for index, _ in zip(indices, range(_LOOKAHEAD), strict=False):
            if index not in self._tasks and not self._known(index):
                self._tasks[index] = asyncio.create_task(self._encode(index), name="encode")

    async def get(self, index: int) -> bytes | None:
        """The delta of a ready chunk; None if it is not smaller than the chunk."""
        self.prefetch([index])
        if index in self._tasks:
            # Shielded, since readers share the work and one of them may be cancelled.
            await asyncio.shield(self._tasks[index])
        return self._staging.delta(index, self._base_version)

    def _known(self, index: int) -> bool:
        return self._staging.has_delta(index, self._base_version)

    async def _encode(self, index: int) -> None:
        try:
            started_s = time.monotonic()
            made = await asyncio.to_thread(
                _encode,
                self._staging.slot(index),
                self.base.matching_range(self._staging, index),
                self._sizes[index],
            )
            self._observe(time.monotonic() - started_s)
            self._num_incompressible = 0 if made is not None else self._num_incompressible + 1
            self._staging.keep_delta(index, self._base_version, made)
        finally:
            del self._tasks[index]


def _encode(new: memoryview, base: memoryview, item_bytes: int) -> bytes | None:
    return delta.encode(new, base, item_bytes=item_bytes)
