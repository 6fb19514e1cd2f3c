"""The receiving end of an HTTP/1.1 response whose bytes go straight to where they belong."""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

from paceline.errors import NotFoundError, UnavailableError

_SPILL_BYTES = 4096
_MAX_HEAD_BYTES = 16384


class Response(asyncio.BufferedProtocol):
    """A response body that is read by exact lengths.

    While somebody waits in `read_into`, the socket writes into that buffer; what comes in between
    is kept in a small spill, and reading pauses when that is full.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._spill = bytearray(_SPILL_BYTES)
        self._spilled = memoryview(self._spill)[:0]
        self._target = self._spilled
        self._filled = 0
        self._reader: asyncio.Future[None] | None = None
        self._paused = False
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        # A cast, because transports of other event loops need not be subclasses.
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the event loop: where to write next."""
        if self._reader is not None:
            return self._target[self._filled :]
        return memoryview(self._spill)

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the event loop: that much was written."""
        if self._reader is None:
            self._spilled = memoryview(self._spill)[:nbytes]
            self._pause()
            return
        self._filled += nbytes
        if self._filled == len(self._target):
            self._end_read()

    def eof_received(self) -> None:
        """Called by the event loop: the peer is done."""
        self._ended = True
        self._end_read()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._ended = True
        self._end_read()

    async def read_into(self, target: memoryview) -> None:
        """Fill `target`; raises `UnavailableError` when the peer ends before."""
        taken = min(len(self._spilled), len(target))
        target[:taken] = self._spilled[:taken]
        self._spilled = self._spilled[taken:]
        if taken < len(target):
            await self._receive(target[taken:])

    async def read(self, num_bytes: int) -> bytes:
        """Exactly that many bytes."""
        data = bytearray(num_bytes)
        await self.read_into(memoryview(data))
        return bytes(data)

    async def read_head(self) -> int:
        """Read status line and headers; the status."""
        head = bytearray()
        while not head.endswith(b"\r\n\r\n"):
            head += await self.read(1)
            if len(head) > _MAX_HEAD_BYTES:
                raise UnavailableError("weights: the peer does not speak HTTP")
        words = bytes(head).split(b" ", 2)
        if len(words) < 3 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise UnavailableError("weights: the peer does not speak HTTP")
        return int(words[1])

    def send(self, data: bytes) -> None:
        """Write the request."""
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def _receive(self, target: memoryview) -> None:
        if not self._ended:
            self._target, self._filled = target, 0
            self._reader = asyncio.get_running_loop().create_future()
            self._resume()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._ended and self._filled < len(target):
            raise UnavailableError("weights: the peer ended the stream early")
        self._filled = 0

    def _end_read(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._transport.pause_reading()
            self._paused = True

    def _resume(self) -> None:
        if self._transport is not None and self._paused:
            self._transport.resume_reading()
            self._paused = False


async def get(endpoint: str, path: str) -> Response:
    """Ask for a path; the response after its headers. Raises `NotFoundError` on 404."""
    parts = urlsplit(endpoint)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise UnavailableError(f"weights: {endpoint!r} is not http://host:port")
    loop = asyncio.get_running_loop()
    try:
        _, response = await loop.create_connection(Response, parts.hostname, parts.port)
    except OSError as error:
        raise UnavailableError(f"weights: {endpoint}: {error}") from error
    try:
        response.send(
            f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
        )
        status = await response.read_head()
        if status == 404:
            raise NotFoundError(f"weights: {endpoint} does not hold {path}")
        if status != 200:
            raise UnavailableError(f"weights: {endpoint} answered {status}")
    except BaseException:
        response.close()
        raise
    return response
