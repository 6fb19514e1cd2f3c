"""What only shared memory has to promise; the rest is in `paceline.testing.weight_transports`."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import AsyncIterator

import pytest

from paceline.errors import IntegrityError, NotFoundError, PermissionDeniedError, UnavailableError
from paceline.testing.weight_fleet import (
    KEY,
    Fleet,
    content,
    fill,
    header_of,
    until,
)
from paceline.weights import SnapshotHeader, Staging, TransportSettings, pull
from paceline.weights.shared_memory.borrower import borrow
from paceline.weights.shared_memory.loan import address
from paceline.weights.snapshot.memory import SharedMemory, SharedMemoryPool, borrowed
from paceline.weights.transport import make_transport
from paceline_harness.patience import PATIENCE_S


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet("shared_memory") as members:
        yield members


@pytest.fixture
async def http() -> AsyncIterator[Fleet]:
    async with Fleet("http") as members:
        yield members


def stage(header: SnapshotHeader, memory: SharedMemory) -> Staging:
    return Staging(header, key=KEY, memory=memory)


def keyed(header: SnapshotHeader) -> Staging:
    return Staging(header, key=KEY)


async def take(endpoint: str, *, version: int = 1, key: bytes = KEY) -> Staging:
    return await borrow(endpoint, job_id="job", version=version, key=key, stage=stage)


async def test_a_version_is_in_memory_once(fleet: Fleet) -> None:
    trainer, first, second = [await fleet.member() for _ in range(3)]
    inode = os.fstat(trainer.offer(1).memory.fd).st_ino
    first.follow(1, trainer)
    second.follow(1, first)
    for worker in (first, second):
        assert os.fstat((await worker.received(1)).memory.fd).st_ino == inode
        assert [report.wire_bytes for report in worker.reports] == [0]


async def test_whoever_has_the_descriptor_cannot_write(fleet: Fleet) -> None:
    trainer = await fleet.member()
    fd = trainer.offer(1).memory.fd
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: os.ftruncate(fd, 1 << 30),
        lambda: mmap.mmap(fd, 4096),
        lambda: fcntl.fcntl(fd, 1033, 0),
    ):
        with pytest.raises(PermissionError):
            change()


async def test_loans_are_refused_with_a_reason(fleet: Fleet) -> None:
    trainer = await fleet.member()
    trainer.offer(1)
    with pytest.raises(PermissionDeniedError, match="refuses to lend"):
        await take(trainer.endpoint, key=b"another")
    with pytest.raises(NotFoundError, match="does not hold version 9"):
        await take(trainer.endpoint, version=9)
    with pytest.raises(UnavailableError, match="lends no memory on this machine"):
        await take("http://10.1.2.3:8402")
    trainer.transport.publish(header_of(2), key=KEY, part=1, parts=2)
    with pytest.raises(UnavailableError, match="does not lend version 2"):
        await take(trainer.endpoint, version=2)


async def test_garbage_ends_the_connection_and_nothing_else(fleet: Fleet) -> None:
    trainer = await fleet.member()
    trainer.offer(1)
    for garbage in (b"\xff" * 8, b"\x04\0\0\0\xff\xff\xff\xff", b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(address(trainer.endpoint))
            await asyncio.to_thread(stranger.sendall, garbage)
            stranger.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(stranger.recv, 1) == b""
    assert (await take(trainer.endpoint)).complete


def test_memory_that_could_change_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 1000)
    lease, end = os.pipe()
    with pytest.raises(IntegrityError, match="with seals"):
        borrowed(fd, end, 1000)
    os.close(lease)
    memory = SharedMemoryPool().take(1000)
    with pytest.raises(IntegrityError, match="1000 bytes of memory"):
        borrowed(*map(os.dup, memory.lend()), num_bytes=1001)


def test_lent_memory_is_used_again_once_it_is_returned() -> None:
    pool = SharedMemoryPool()
    first = pool.take(1000)
    inode = os.fstat(first.fd).st_ino
    reader = borrowed(*map(os.dup, first.lend()), num_bytes=1000)
    later = borrowed(*map(os.dup, reader.lend()), num_bytes=1000)  # passed on
    del first, reader
    second = pool.take(1000)
    assert os.fstat(second.fd).st_ino != inode
    del later, second
    taken = [pool.take(1000) for _ in range(2)]
    assert inode in {os.fstat(each.fd).st_ino for each in taken}


async def test_what_is_not_lent_comes_over_http(fleet: Fleet, http: Fleet) -> None:
    """In both directions, and where the lender goes on without its socket."""
    plain, worker = await http.member(), await fleet.member()
    reader = await http.member()
    plain.offer(1)
    worker.follow(1, plain)
    held = await worker.received(1)
    assert bytes(held.buffer()) == content(1)
    reader.follow(1, worker)
    assert bytes((await reader.received(1)).buffer()) == content(1)
    assert worker.reports[-1].wire_bytes > 0


async def test_a_loan_that_ends_early_is_followed_by_http(fleet: Fleet, http: Fleet) -> None:
    """Another peer without memory to lend has the version; nothing of the loan is left."""
    plain, worker = await http.member(), await fleet.member()
    async with fleet.process("publish", chunks=15) as publisher:
        worker.follow(1, publisher.endpoint)
        await until(lambda: worker.num_ready(1) >= 15)
        plain.offer(1)
        worker.follow(1, plain)
        publisher.kill()
    held = await worker.received(1)
    assert bytes(held.buffer()) == content(1)
    assert worker.receiver.held(1) is held


async def test_a_lender_that_falls_silent_is_left(fleet: Fleet, http: Fleet) -> None:
    plain, worker = await http.member(), await fleet.member()
    plain.offer(1)
    endpoint = "http://127.0.0.1:1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(address(endpoint))
        silent.listen()
        worker.follow(1, endpoint, plain)
        async with asyncio.timeout(PATIENCE_S):
            held = await worker.received(1)
    assert bytes(held.buffer()) == content(1)


async def test_an_address_that_is_taken_only_costs_the_shortcut() -> None:
    """`auto` says so and serves HTTP; `shared_memory` does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = TransportSettings(host="127.0.0.1", port=port)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
        taken.bind(address(f"http://127.0.0.1:{port}"))
        with pytest.raises(UnavailableError, match="memory cannot be lent"):
            await make_transport("shared_memory", settings).start()
        transport = make_transport("auto", settings)
        endpoint = await transport.start()
        staging = transport.publish(header_of(1), key=KEY)
        fill(staging, 1)
        staging.finish()
        pulled = await pull(
            [endpoint], job_id="job", version=1, stage=keyed, timeout_s=PATIENCE_S, key=KEY
        )
        assert bytes(pulled.buffer()) == content(1)
        await transport.close()
