"""Borrows the memory of one snapshot from a process of this machine, and verifies it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from paceline.errors import (
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    VersionGoneError,
)
from paceline.v1 import weights_pb2 as pb
from paceline.weights.shared_memory.loan import Answer, address, check_user
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.memory import SharedMemory, borrowed
from paceline.weights.snapshot.staging import Staging
from paceline.weights.snapshot.threads import in_thread
from paceline.weights.snapshot.verification import SnapshotAuthenticator, pull_token
from paceline.weights.stream import frames
from paceline.weights.stream.frames import ChunkFrame, Frame, HeaderFrame, TrailerFrame
from paceline.weights.transfer.countdown import running_timeout

_NUM_FDS = 2  # memory and lease
_SILENCE_S = 5.0  # of a lender, which sends keepalives
Stage = Callable[[SnapshotHeader, SharedMemory], Staging]


async def borrow(endpoint: str, *, job_id: str, version: int, key: bytes, stage: Stage) -> Staging:
    """Have the memory of a version lent by the process that serves `endpoint`, and verify it.

    `stage` is called once, with the header and the memory. Raises `NotFoundError`,
    `VersionGoneError`, `PermissionDeniedError`, `IntegrityError`, `StateError`, or
    `UnavailableError`: nobody lends here, or the lender has ended or falls silent.
    """
    async with _connected(endpoint) as connection:
        token = pull_token(key) if key else ""
        body = pb.BorrowRequest(job_id=job_id, version=version, token=token).SerializeToString()
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(connection, frames.LENGTH.pack(len(body)) + body)
            fds = await _lent(connection, endpoint, version)
        except OSError as error:
            raise UnavailableError(f"weights: {endpoint} lends no memory: {error}") from error
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connection.dup())
        except BaseException:
            _close(fds)
            raise
        try:
            return await _Loan(reader, endpoint, key).take(fds, job_id, version, stage)
        finally:
            writer.transport.abort()


@asynccontextmanager
async def _connected(endpoint: str) -> AsyncGenerator[socket.socket]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        try:
            connection.connect(address(endpoint))  # at once, or never
        except OSError as error:
            raise UnavailableError(
                f"weights: {endpoint} lends no memory on this machine: {error}"
            ) from error
        check_user(connection)
        yield connection
    finally:
        connection.close()


async def _lent(connection: socket.socket, endpoint: str, version: int) -> list[int]:
    """The descriptors that the lender sends."""
    while True:
        await _readable(connection, endpoint)
        data, fds, _, _ = socket.recv_fds(connection, 1, _NUM_FDS, socket.MSG_CMSG_CLOEXEC)
        answer = data[0] if data else 0
        if answer == Answer.LENT and len(fds) == _NUM_FDS:
            return fds
        _close(fds)
        match answer:
            case Answer.WAIT:
                continue
            case Answer.NOT_FOUND:
                raise NotFoundError(f"weights: {endpoint} does not hold version {version}")
            case Answer.GONE:
                raise VersionGoneError(f"weights: {endpoint} no longer holds version {version}")
            case Answer.DENIED:
                raise PermissionDeniedError(f"weights: {endpoint} refuses to lend to this process")
            case _:
                raise UnavailableError(f"weights: {endpoint} does not lend version {version}")


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


async def _readable(connection: socket.socket, endpoint: str) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        async with running_timeout(_SILENCE_S):
            await ready
    except TimeoutError:
        raise UnavailableError(f"weights: {endpoint} does not answer") from None
    finally:
        loop.remove_reader(connection.fileno())


class _Loan:
    """The frames of one lender, and the memory that they are about."""

    def __init__(self, reader: asyncio.StreamReader, endpoint: str, key: bytes) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._key = key

    async def take(self, fds: list[int], job_id: str, version: int, stage: Stage) -> Staging:
        """Verify chunk by chunk, until the trailer."""
        try:
            header = await self._header(job_id, version)
        except BaseException:
            _close(fds)
            raise
        staging = stage(header, borrowed(*fds, num_bytes=header.num_bytes))
        if not header.num_chunks:
            staging.finish()
        try:
            await self._chunks(staging)
        except BaseException:
            staging.abandon()
            raise
        return staging

    async def _header(self, job_id: str, version: int) -> SnapshotHeader:
        frame = await self._frame(first=True)
        if not isinstance(frame, HeaderFrame):
            raise IntegrityError("weights: a loan does not begin with a header")
        header = frame.header
        if (header.job_id, header.version) != (job_id, version):
            raise IntegrityError(
                f"weights: requested version {version} of {job_id}, "
                f"got {header.version} of {header.job_id}"
            )
        SnapshotAuthenticator(header, self._key).check_header(frame.authentication)
        return header

    async def _chunks(self, staging: Staging) -> None:
        while True:
            match await self._frame():
                case ChunkFrame() as frame:
                    frames.check_chunk(frame, staging.header, base_version=None)
                    if staging.is_ready(frame.index):
                        raise IntegrityError(f"weights: chunk {frame.index} was sent twice")
                    await in_thread(staging.verify, frame.index, frame.digest)
                    staging.accept(frame.index, frame.digest)
                case TrailerFrame() as frame:
                    if not staging.complete or not frame.root:
                        raise UnavailableError(f"weights: {self._endpoint} lacks some chunks")
                    staging.verify_trailer(frame)
                    return
                case HeaderFrame():
                    raise IntegrityError("weights: a second header in one loan")
                case _:  # a keepalive
                    pass

    async def _frame(self, *, first: bool = False) -> Frame:
        try:
            async with running_timeout(_SILENCE_S):
                length = await self._reader.readexactly(frames.LENGTH.size)
                num_bytes = frames.parse_length(length, first=first)
                return frames.parse(await self._reader.readexactly(num_bytes))
        except TimeoutError:
            raise UnavailableError(f"weights: {self._endpoint} falls silent") from None
        except (EOFError, OSError) as error:
            raise UnavailableError(
                f"weights: {self._endpoint} has ended the loan: {error}"
            ) from error
