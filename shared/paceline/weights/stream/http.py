"""An HTTP client that receives response bytes directly into their destination buffer."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from paceline.config.service import TlsSettings
from paceline.errors import (
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    VersionGoneError,
)
from paceline.platform.transport.rpc_authorization import WEIGHT_PEERS
from paceline.platform.transport.tls import client_context, peer_kinds

_SMALL_BYTES = 4096
_MAX_HEAD_BYTES = 16384
_END = b"\r\n\r\n"


class Stalled(UnavailableError):
    """No byte arrived for too long."""


class Ended(UnavailableError):
    """The peer closed the connection early."""


class Response(asyncio.BufferedProtocol):
    """A response body, read in exact lengths.

    While a `read_into` waits for more than a few bytes, the socket writes into its target. At other
    times it writes into a small buffer, and reading pauses until that has been consumed.
    """

    def __init__(self) -> None:
        self.num_received = 0  # bytes in total
        self._socket: socket.socket | None = None
        self._batch_bytes = 1
        self._threshold = 1
        self._transport: asyncio.Transport | None = None
        self._small_buffer = memoryview(bytearray(_SMALL_BYTES))
        self._unread = self._small_buffer[:0]
        self._target = self._small_buffer[:0]
        self._filled = 0
        self._direct = False
        self._reader: asyncio.Future[None] | None = None
        self._paused = False
        self._ended = False
        self._error: UnavailableError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        # A cast, since transports of other event loops need not be subclasses.
        self._transport = cast(asyncio.Transport, transport)
        # With TLS, bytes are buffered above the socket, where SO_RCVLOWAT does not see them.
        if sys.platform == "linux" and transport.get_extra_info("ssl_object") is None:
            self._socket = transport.get_extra_info("socket")

    def batch(self, num_bytes: int) -> None:
        """Let the kernel collect up to `num_bytes` before it wakes the event loop.

        Packets on a slow link arrive one at a time, and a loop iteration costs more than a packet.
        """
        self._batch_bytes = num_bytes
        self._set_threshold(len(self._target) - self._filled if self._reader else 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the event loop: the buffer to write into next."""
        self._direct = self._reader is not None and (
            len(self._target) - self._filled >= _SMALL_BYTES
        )
        return self._target[self._filled :] if self._direct else self._small_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the event loop: `nbytes` were written."""
        self.num_received += nbytes
        if self._direct:
            self._filled += nbytes
        else:
            self._unread = self._small_buffer[:nbytes]
            self._take()
            if self._unread:
                # The small buffer must not be overwritten before it is consumed.
                self._pause()
        if self._filled == len(self._target):
            self._end_read()
        elif self._reader is not None:
            self._set_threshold(len(self._target) - self._filled)

    def eof_received(self) -> None:
        """Called by the event loop: the peer has closed its side."""
        self._ended = True
        self._end_read()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._ended = True
        if exc is not None and self._error is None:
            self._error = Ended(f"weights: the peer ended the stream early: {exc}")
        self._end_read()

    async def read_into(self, target: memoryview) -> None:
        """Fill `target`; raises `UnavailableError` if the stream ends early."""
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
            raise self._end_error()

    def _end_error(self) -> UnavailableError:
        # Not kept: a raised exception refers to everything in its frames.
        error, self._error = self._error, None
        return error or Ended("weights: the peer ended the stream early")

    async def read(self, num_bytes: int) -> bytes:
        """Read exactly `num_bytes`."""
        if len(self._unread) >= num_bytes:
            taken, self._unread = self._unread[:num_bytes], self._unread[num_bytes:]
            return bytes(taken)
        data = bytearray(num_bytes)
        await self.read_into(memoryview(data))
        return bytes(data)

    async def read_head(self) -> int:
        """Read status line and headers; returns the status code."""
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
        """Abort the connection; a pending read raises `error`."""
        self._error = self._error or error
        self._ended = True
        self._end_read()
        # Otherwise the last target keeps a whole snapshot alive until this is collected.
        self._target = self._small_buffer[:0]
        if self._transport is not None:
            self._transport.abort()

    def _set_threshold(self, awaited_bytes: int) -> None:
        threshold = max(min(awaited_bytes, self._batch_bytes), 1)
        if self._socket is not None and threshold != self._threshold and not self._ended:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, threshold)
            self._threshold = threshold

    def _take(self) -> None:
        taken = min(len(self._unread), len(self._target) - self._filled)
        if taken:
            self._target[self._filled : self._filled + taken] = self._unread[:taken]
            self._filled += taken
            self._unread = self._unread[taken:]

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
class PeerTls:
    """How peers are verified: by their TLS name and by a kind that may serve weights."""

    context: ssl.SSLContext
    name: str

    def check(self, transport: asyncio.BaseTransport, endpoint: str) -> None:
        """Raise `UnavailableError` unless the peer is a trainer or rollout worker."""
        if WEIGHT_PEERS.isdisjoint(peer_kinds(transport, self.name)):
            raise UnavailableError(
                f"weights: {endpoint}: its certificate is not that of a trainer or rollout worker"
            )


def peer_tls(tls: TlsSettings | None) -> PeerTls | None:
    """Verification by the given settings; raises `ConfigError`."""
    return None if tls is None else PeerTls(client_context(tls), tls.peer_name)


async def post(
    endpoint: str, path: str, body: bytes, *, token: str = "", peer: PeerTls | None = None
) -> Response:
    """POST over HTTP/1.0, so that the body is not chunked and ends with the connection.

    Returns the response once its headers are read. Raises `NotFoundError` on 404,
    `VersionGoneError` on 410, `PermissionDeniedError` on 403, `UnavailableError` otherwise.
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
        raise VersionGoneError(f"weights: {endpoint} no longer holds {path}")
    if status == 403:
        raise PermissionDeniedError(f"weights: {endpoint} refuses {path} to this process")
    if status != 200:
        raise UnavailableError(f"weights: {endpoint} answered {status}")
