"""Lends the memory of snapshots, and sends the digests of chunks as they become ready."""

from __future__ import annotations

import asyncio
import socket

from google.protobuf.message import DecodeError

from paceline.errors import (
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
    VersionGoneError,
)
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.v1 import weights_pb2 as pb
from paceline.weights.shared_memory.loan import (
    KEEPALIVE_S,
    MAX_REQUEST_BYTES,
    Answer,
    address,
    check_user,
)
from paceline.weights.snapshot.staging import Staging
from paceline.weights.stream.frames import LENGTH, waiting_frame
from paceline.weights.transfer.server import WeightServer

_REQUEST_S = 5.0
_SEND_S = 30.0  # for a borrower that does not read
_MAX_BORROWERS = 1024
log = Log("weights")


class MemoryLender:
    """Lends what a weight server holds, to processes of this user that know the job's token."""

    def __init__(self, server: WeightServer, *, metrics: Metrics | None = None) -> None:
        self._held = server
        self._metrics = metrics
        self._listening: asyncio.Server | None = None
        self._num_borrowers = 0

    async def start(self, endpoint: str) -> None:
        """Lend as the process that serves HTTP at `endpoint`. Raises `UnavailableError`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address(endpoint))
        except OSError as error:
            listener.close()
            raise UnavailableError(f"weights: memory cannot be lent: {error}") from error
        self._listening = await asyncio.start_unix_server(
            self._serve, sock=listener, limit=MAX_REQUEST_BYTES
        )

    async def close(self) -> None:
        """Stop lending; what is lent stays with the borrowers."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Streams cannot send descriptors; both sockets are one connection.
        own = writer.get_extra_info("socket").fileno()
        beside = socket.fromfd(own, socket.AF_UNIX, socket.SOCK_STREAM)
        self._num_borrowers += 1
        try:
            if self._num_borrowers <= _MAX_BORROWERS:
                await self._answer(reader, writer, beside)
                writer.close()
                async with asyncio.timeout(_SEND_S):
                    await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, StateError, IntegrityError) as error:
            log.info("loan ended", error=error)
        finally:
            self._num_borrowers -= 1
            beside.close()
            writer.transport.abort()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, beside: socket.socket
    ) -> None:
        try:
            check_user(beside)
            async with asyncio.timeout(_REQUEST_S):
                request = await _read_request(reader)
            await self._held.find(request.job_id, request.version, token=request.token)
        except NotFoundError:
            beside.send(bytes([Answer.NOT_FOUND]))
        except VersionGoneError:
            beside.send(bytes([Answer.GONE]))
        except PermissionDeniedError as error:
            log.warning("memory not lent", error=error)
            beside.send(bytes([Answer.DENIED]))
        else:
            staging = await self._staged(beside, request)
            if staging.num_own < staging.header.num_chunks:
                beside.send(bytes([Answer.CANNOT]))  # a seeder has no digests of other parts
                return
            socket.send_fds(beside, [bytes([Answer.LENT])], staging.memory.lend())
            await _send_frames(writer, staging)
            if self._metrics is not None:
                moved = {"direction": "out", "kind": "shared"}
                num_bytes = staging.header.num_bytes
                self._metrics.add("weight_bytes", num_bytes, job=request.job_id, **moved)

    async def _staged(self, beside: socket.socket, request: pb.BorrowRequest) -> Staging:
        while True:
            staging = await self._held.staged(
                request.job_id, request.version, timeout_s=KEEPALIVE_S
            )
            if staging is not None:
                return staging
            beside.send(bytes([Answer.WAIT]))  # fails once the borrower reads no longer


async def _read_request(reader: asyncio.StreamReader) -> pb.BorrowRequest:
    (num_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if num_bytes > MAX_REQUEST_BYTES:
        raise IntegrityError(f"weights: a request of {num_bytes} bytes")
    try:
        return pb.BorrowRequest.FromString(await reader.readexactly(num_bytes))
    except DecodeError as error:
        raise IntegrityError(f"weights: a request that cannot be read: {error}") from error


async def _send_frames(writer: asyncio.StreamWriter, staging: Staging) -> None:
    """Header, digests as they become ready, trailer."""
    await _send(writer, staging.header_frame())
    cursor = 0
    while cursor < staging.header.num_chunks:
        ready = staging.ready_since(cursor)
        cursor += len(ready)
        await _send(writer, b"".join(staging.chunk_frame(index) for index in ready))
        if cursor < staging.header.num_chunks:
            while not await staging.wait(cursor, timeout_s=KEEPALIVE_S):
                await _send(writer, waiting_frame(cursor))
    await staging.wait(cursor)  # for the root
    await _send(writer, staging.trailer_frame())


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(_SEND_S):
        await writer.drain()
