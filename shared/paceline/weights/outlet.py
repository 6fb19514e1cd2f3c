"""One stream of chunks to one peer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from paceline.weights.encoder import Encoder
from paceline.weights.frames import Request, waiting_frame
from paceline.weights.pace import Pace
from paceline.weights.staging import Staging

_WAITING_S = 0.1  # between two signs of life

Write = Callable[[bytes | memoryview], Awaitable[None]]


class Outlet:
    """Sends what was asked for in the order in which it becomes ready.

    `encoder` gives what makes differences against the base asked for, None when that is not held.
    `count` is told the bytes of each chunk and whether they were a difference.
    """

    def __init__(
        self,
        *,
        write: Write,
        staging: Staging,
        asked: Request,
        encoder: Callable[[], Encoder | None],
        pace: Pace,
        count: Callable[[int, bool], None],
    ) -> None:
        self._write = write
        self._staging = staging
        self._asked = asked
        self._encoder = encoder
        self._pace = pace
        self._count = count

    async def send(self) -> None:
        """From the header to the trailer. Raises `StateError` when the snapshot is abandoned."""
        with self._pace.shared():
            await self._send()

    async def _send(self) -> None:
        staging, cursor = self._staging, 0
        num_chunks = staging.header.num_chunks
        left = set(self._asked.indices(num_chunks))
        left.intersection_update(range(staging.part, num_chunks, staging.parts))
        await self._write(staging.header_frame())
        while left:
            fresh = staging.ready_since(cursor)
            cursor += len(fresh)
            await self._send_chunks([index for index in fresh if index in left])
            left.difference_update(fresh)
            while left and not await staging.wait(cursor, timeout_s=_WAITING_S):
                await self._waiting()
        if staging.num_ready == staging.num_own:
            await staging.wait(staging.num_own)  # for its root
        await self._write(staging.trailer_frame())

    async def _send_chunks(self, indices: Sequence[int]) -> None:
        for place, index in enumerate(indices):
            encoder = self._encoder()
            if encoder is not None:
                encoder.begin(indices[place:])
            payload = await self._delta(index, encoder)
            if payload is None:
                await self._write(self._staging.chunk_frame(index))
                await self._pour(self._staging.slot(index).toreadonly())
            else:
                await self._write(
                    self._staging.chunk_frame(
                        index, num_bytes=len(payload), base_version=self._asked.base_version
                    )
                )
                await self._pour(memoryview(payload))

    async def _delta(self, index: int, encoder: Encoder | None) -> bytes | None:
        base_version = self._asked.base_version
        if base_version is None:
            return None
        if encoder is None or self._staging.has_delta(index, base_version):
            return self._staging.delta(index, base_version)
        return await self._lively(encoder.get(index))

    async def _lively(self, encoding: Coroutine[None, None, bytes | None]) -> bytes | None:
        """What is being encoded; signs of life are sent meanwhile."""
        task = asyncio.create_task(encoding)
        try:
            while not (await asyncio.wait({task}, timeout=_WAITING_S))[0]:
                await self._waiting()
            return task.result()
        finally:
            task.cancel()

    async def _pour(self, data: memoryview) -> None:
        start = 0
        while start < data.nbytes:
            # Asked for each time: the pieces shrink when more streams open.
            piece = data[start : start + (self._pace.piece_bytes or data.nbytes)]
            await self._pace.take(piece.nbytes)
            await self._write(piece)
            start += piece.nbytes
        self._count(data.nbytes, data.obj is not self._staging.buffer().obj)

    async def _waiting(self) -> None:
        await self._write(waiting_frame(self._staging.num_ready))
