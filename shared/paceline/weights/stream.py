"""The receiving end of an HTTP response whose bytes go straight to where they belong."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from paceline.callers import WEIGHTS
from paceline.config.service import TlsSettings
from paceline.errors import (
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    VersionGoneError,
)
from paceline.tls import client_context, peer_kinds

_SPILL_BYTES = 4096
_MAX_HEAD_BYTES = 16384
_END = b"\r\n\r\n"


class Stalled(UnavailableError):
    """No byte came for too long."""


class Ended(UnavailableError):
    """The peer dropped the connection before all was here."""


class Response(asyncio.BufferedProtocol):
    """A response body that is read by exact lengths.

    While somebody waits in `read_into` for more than a little, the socket writes into that buffer.
    Else it writes into a small spill, and reading pauses when nobody takes that out.
    """

    def __init__(self) -> None:
        self.num_received = 0  # bytes, all told
        self._socket: socket.socket | None = None
        self._batch_bytes = 1
        self._threshold = 1
        self._transport: asyncio.Transport | None = None
        self._spill = memoryview(bytearray(_SPILL_BYTES))
        self._spilled = self._spill[:0]
        self._target = self._spill[:0]
        self._filled = 0
        self._direct = False
        self._reader: asyncio.Future[None] | None = None
        self._paused = False
        self._ended = False
        self._error: UnavailableError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        # A cast, because transports of other event loops need not be subclasses.
        self._transport = cast(asyncio.Transport, transport)
        # What TLS has taken from the socket, the socket does not know of.
        if sys.platform == "linux" and transport.get_extra_info("ssl_object") is None:
            self._socket = transport.get_extra_info("socket")

    def batch(self, num_bytes: int) -> None:
        """Let the kernel gather so many bytes, where more are awaited, before it wakes us.

        Packets of a slow link come one by one, and a turn of the event loop costs more than they.
        """
        self._batch_bytes = num_bytes
        self._set_threshold(len(self._target) - self._filled if self._reader else 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the event loop: where to write next."""
        self._direct = self._reader is not None and (
            len(self._target) - self._filled >= _SPILL_BYTES
        )
        return self._target[self._filled :] if self._direct else self._spill

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the event loop: that much was written."""
        self.num_received += nbytes
        if self._direct:
            self._filled += nbytes
        else:
            self._spilled = self._spill[:nbytes]
            self._take()
            if self._spilled:
                # The spill may not be overwritten until somebody has read all of it.
                self._pause()
        if self._filled == len(self._target):
            self._end_read()
        elif self._reader is not None:
            self._set_threshold(len(self._target) - self._filled)

    def eof_received(self) -> None:
        """Called by the event loop: the peer is done."""
        self._ended = True
        self._end_read()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._ended = True
        if exc is not None and self._error is None:
            self._error = Ended(f"weights: the peer ended the stream early: {exc}")
        self._end_read()

    async def read_into(self, target: memoryview) -> None:
        """Fill `target`; raises `UnavailableError` when the peer ends before."""
        self._target, self._filled = target, 0
        self._take()
        if self._filled == len(target):
            return
        if not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            self._set_threshold(len(target) - self._filled)
            self._resume()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._filled < len(target):
            raise self._why()

    def _why(self) -> UnavailableError:
        # Not kept: what is raised refers to all that its frames hold.
        error, self._error = self._error, None
        return error or Ended("weights: the peer ended the stream early")

    async def read(self, num_bytes: int) -> bytes:
        """Exactly that many bytes."""
        if len(self._spilled) >= num_bytes:
            taken, self._spilled = self._spilled[:num_bytes], self._spilled[num_bytes:]
            return bytes(taken)
        data = bytearray(num_bytes)
        await self.read_into(memoryview(data))
        return bytes(data)

    async def read_head(self) -> int:
        """Read status line and headers; the status."""
        head = bytearray()
        while not head.endswith(_END):
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

    def close(self, error: UnavailableError | None = None) -> None:
        """Drop the connection at once; who reads gets this error."""
        self._error = self._error or error
        self._ended = True
        self._end_read()
        # Else what was read last keeps a whole snapshot in memory until this is collected.
        self._target = self._spill[:0]
        if self._transport is not None:
            self._transport.abort()

    def _set_threshold(self, awaited_bytes: int) -> None:
        threshold = max(min(awaited_bytes, self._batch_bytes), 1)
        if self._socket is not None and threshold != self._threshold and not self._ended:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, threshold)
            self._threshold = threshold

    def _take(self) -> None:
        taken = min(len(self._spilled), len(self._target) - self._filled)
        if taken:
            self._target[self._filled : self._filled + taken] = self._spilled[:taken]
            self._filled += taken
            self._spilled = self._spilled[taken:]

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


@dataclass(frozen=True, slots=True)
class Secure:
    """How peers are verified: by the common name, and by that of a kind that gives weights."""

    context: ssl.SSLContext
    name: str

    def check(self, transport: asyncio.BaseTransport, endpoint: str) -> None:
        """Raise `UnavailableError` if the other end is no trainer and no rollout worker."""
        if WEIGHTS.isdisjoint(peer_kinds(transport, self.name)):
            raise UnavailableError(
                f"weights: {endpoint}: its certificate is neither a trainer's nor a rollout's"
            )


def secure(tls: TlsSettings | None) -> Secure | None:
    """From the settings; raises `ConfigError`."""
    return None if tls is None else Secure(client_context(tls), tls.peer_name)


async def post(
    endpoint: str, path: str, body: bytes, *, token: str = "", peer: Secure | None = None
) -> Response:
    """Ask by HTTP/1.0, so that the answer comes as it is and ends with the connection.

    The response after its headers. Raises `NotFoundError` on 404, `VersionGoneError` on 410,
    `PermissionDeniedError` on 403, `UnavailableError` on all else.
    """
    parts = urlsplit(endpoint)
    scheme = "http" if peer is None else "https"
    if parts.scheme != scheme or not parts.hostname or not parts.port:
        raise UnavailableError(f"weights: {endpoint!r} is not {scheme}://host:port")
    loop = asyncio.get_running_loop()
    try:
        transport, response = await loop.create_connection(
            Response,
            parts.hostname,
            parts.port,
            ssl=None if peer is None else peer.context,
            server_hostname=None if peer is None else peer.name,
        )
    except OSError as error:
        raise UnavailableError(f"weights: {endpoint}: {error}") from error
    try:
        if peer is not None:
            peer.check(transport, endpoint)
        lines = [f"POST {path} HTTP/1.0", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        response.send("\r\n".join(lines).encode() + _END + body)
        _check(await response.read_head(), endpoint, path)
    except BaseException:
        response.close()
        raise
    return response


def _check(status: int, endpoint: str, path: str) -> None:
    if status == 404:
        raise NotFoundError(f"weights: {endpoint} does not hold {path}")
    if status == 410:
        raise VersionGoneError(f"weights: {endpoint} does not hold {path} any more")
    if status == 403:
        raise PermissionDeniedError(f"weights: {endpoint} does not give {path} to this process")
    if status != 200:
        raise UnavailableError(f"weights: {endpoint} answered {status}")
