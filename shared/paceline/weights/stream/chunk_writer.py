"""Writes the chunk stream of one snapshot to one peer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from paceline.weights.snapshot.staging import Staging
from paceline.weights.stream.delta_encoder import Encoder
from paceline.weights.stream.frames import ChunkRequest, waiting_frame
from paceline.weights.stream.rate_limit import RateLimit

_KEEPALIVE_S = 0.1

Write = Callable[[bytes | memoryview], Awaitable[None]]


class ChunkWriter:
    """Sends the requested chunks in the order in which they become ready.

    `encoder` returns the delta encoder for the requested base, None while that is not held.
    `count` is called with the bytes of each chunk and whether they were a delta.
    """

    def __init__(
        self,
        *,
        write: Write,
        staging: Staging,
        request: ChunkRequest,
        encoder: Callable[[], Encoder | None],
        pace: RateLimit,
        count: Callable[[int, bool], None],
    ) -> None:
        self._write = write
        self._staging = staging
        self._request = request
        self._encoder = encoder
        self._pace = pace
        self._count = count

    async def send(self) -> None:
        """Send header, chunks and trailer. Raises `StateError` when the snapshot is abandoned."""
        with self._pace.shared():
            await self._send()

    async def _send(self) -> None:
        staging, cursor = self._staging, 0
        num_chunks = staging.header.num_chunks
        remaining = set(self._request.indices(num_chunks))
        remaining.intersection_update(range(staging.part, num_chunks, staging.parts))
        await self._write(staging.header_frame())
        while remaining:
            ready = staging.ready_since(cursor)
            cursor += len(ready)
            await self._send_chunks([index for index in ready if index in remaining])
            remaining.difference_update(ready)
            while remaining and not await staging.wait(cursor, timeout_s=_KEEPALIVE_S):
                await self._send_keepalive()
        if staging.num_ready == staging.num_own:
            await staging.wait(staging.num_own)  # for the root
        await self._write(staging.trailer_frame())

    async def _send_chunks(self, indices: Sequence[int]) -> None:
        held_version = self._request.held_version
        for position, index in enumerate(indices):
            if held_version is not None and self._staging.header.is_frozen(index):
                await self._write(
                    self._staging.chunk_frame(index, num_bytes=0, base_version=held_version)
                )
                continue
            encoder = self._encoder()
            if encoder is not None:
                encoder.prefetch(indices[position:])
            payload = await self._delta(index, encoder)
            if payload is None:
                await self._write(self._staging.chunk_frame(index))
                await self._send_paced(self._staging.slot(index).toreadonly())
            else:
                await self._write(
                    self._staging.chunk_frame(
                        index, num_bytes=len(payload), base_version=self._request.base_version
                    )
                )
                await self._send_paced(memoryview(payload))

    async def _delta(self, index: int, encoder: Encoder | None) -> bytes | None:
        base_version = self._request.base_version
        if base_version is None:
            return None
        if encoder is None or self._staging.has_delta(index, base_version):
            return self._staging.delta(index, base_version)
        return await self._with_keepalives(encoder.get(index))

    async def _with_keepalives(self, encoding: Coroutine[None, None, bytes | None]) -> bytes | None:
        """Await an encoding, sending keepalives meanwhile."""
        task = asyncio.create_task(encoding)
        try:
            while not (await asyncio.wait({task}, timeout=_KEEPALIVE_S))[0]:
                await self._send_keepalive()
            return task.result()
        finally:
            task.cancel()

    async def _send_paced(self, data: memoryview) -> None:
        start = 0
        while start < data.nbytes:
            # Read each time, since pieces shrink as more streams open.
            piece = data[start : start + (self._pace.piece_bytes or data.nbytes)]
            await self._pace.take(piece.nbytes)
            await self._write(piece)
            start += piece.nbytes
        self._count(data.nbytes, data.obj is not self._staging.buffer().obj)

    async def _send_keepalive(self) -> None:
        await self._write(waiting_frame(self._staging.num_ready))
