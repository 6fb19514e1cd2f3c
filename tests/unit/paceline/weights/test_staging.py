from __future__ import annotations

import asyncio
import gc
import math
import mmap
import os
import random
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import IntegrityError, InvalidError, StateError
from paceline.weights import SnapshotHeader, Staging, choose_chunk_bytes, plan
from paceline.weights.canary import Canary, CanarySequence
from paceline.weights.cost import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from paceline.weights.snapshot.manifest import ITEM_BYTES
from paceline.weights.snapshot.memory import SharedMemoryPool
from paceline.weights.stream import frames
from paceline.weights.stream.frames import ChunkFrame, HeaderFrame, TrailerFrame
from paceline_harness.patience import PATIENCE_S

Spec = tuple[str, str, tuple[int, ...]]
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), max_size=8).map(
    lambda found: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(found)]
)


def make_header(
    tensors: Sequence[Spec], *, chunk_bytes: int = 64, version: int = 3
) -> SnapshotHeader:
    entries, total = plan(tensors)
    return SnapshotHeader(
        job_id="job",
        version=version,
        step=version,
        parent_version=version - 1,
        base_version=-1,
        incarnation=1,
        num_bytes=total,
        chunk_bytes=chunk_bytes,
        tensors=entries,
        tied=(("lm_head.weight", "t0"),),
        canary=Canary((CanarySequence((1, 2, 3), (-0.5, -1.25)),), 0.0625, "bfloat16"),
    )


def content(header: SnapshotHeader) -> dict[str, bytes]:
    return {
        t.name: bytes((i * 31 + k) % 251 for k in range(t.num_bytes))
        for i, t in enumerate(header.tensors)
    }


def produce(header: SnapshotHeader, *, key: bytes = b"") -> Staging:
    staging, data = Staging(header, key=key), content(header)
    for entry in header.tensors:
        staging.fill(entry.offset, data[entry.name])
    staging.finish()
    return staging


def chunk_head(source: Staging, index: int) -> ChunkFrame:
    frame = frames.parse(source.chunk_frame(index)[4:])
    assert isinstance(frame, ChunkFrame)
    return frame


def trailer(source: Staging) -> TrailerFrame:
    frame = frames.parse(source.trailer_frame()[4:])
    assert isinstance(frame, TrailerFrame)
    return frame


def receive(source: Staging, order: Sequence[int], *, key: bytes = b"") -> Staging:
    frame = frames.parse(source.header_frame()[4:])
    assert isinstance(frame, HeaderFrame)
    target = Staging(frame.header, key=key)
    target.authenticator.check_header(frame.authentication)
    for index in order:
        head = chunk_head(source, index)
        frames.check_chunk(head, target.header, base_version=None)
        target.slot(index)[:] = source.slot(index)
        target.put(index, head.digest)
    if not order:
        target.finish()
    target.verify_trailer(trailer(source))
    return target


@given(specs=SPECS)
def test_plan_packs_aligned_without_overlap(specs: list[Spec]) -> None:
    entries, total = plan(specs)
    end = 0
    for entry, (_, dtype, shape) in zip(entries, specs, strict=True):
        assert entry.offset % 64 == 0
        assert 0 <= entry.offset - end < 64
        assert entry.num_bytes == math.prod(shape) * ITEM_BYTES[dtype]
        end = entry.offset + entry.num_bytes
    assert total == end


@given(
    specs=SPECS,
    chunk_bytes=st.integers(1, 300),
    key=st.sampled_from([b"", b"secret"]),
    chance=st.randoms(use_true_random=False),
)
def test_chunks_are_received_in_any_order(
    specs: list[Spec], chunk_bytes: int, key: bytes, chance: random.Random
) -> None:
    source = produce(make_header(specs, chunk_bytes=chunk_bytes), key=key)
    order = list(range(source.header.num_chunks))
    chance.shuffle(order)
    target = receive(source, order, key=key)
    assert target.header == source.header
    assert list(target.ready_since(0)) == order
    assert target.complete
    assert target.root == source.root != ""
    expected = content(source.header)
    assert {entry.name: bytes(data) for entry, data in target.tensors()} == expected


def test_unknown_dtype_is_named() -> None:
    with pytest.raises(InvalidError, match="complex64"):
        plan([("w", "complex64", (2,))])


@given(num_bytes=st.integers(1, 1 << 42), receivers=st.integers(1, 500))
def test_chunk_size_is_clamped(num_bytes: int, receivers: int) -> None:
    size = choose_chunk_bytes(num_bytes, receivers=receivers)
    assert MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES
    assert size % 64 == 0


def test_skipped_bytes_are_noticed() -> None:
    staging = Staging(make_header([("a", "uint8", (200,)), ("b", "uint8", (8,))]))
    with pytest.raises(StateError, match="bytes 0 to 256"):
        staging.fill(256, bytes(8))
    with pytest.raises(StateError):
        staging.finish()


def test_chunks_are_ready_as_soon_as_they_are_complete() -> None:
    staging = Staging(make_header([("a", "uint8", (150,))]))
    staging.fill(0, bytes(63))
    assert staging.num_ready == 0
    staging.fill(63, bytes(70))
    assert staging.num_ready == 2
    assert not staging.complete
    with pytest.raises(StateError, match="not complete"):
        next(staging.tensors())


def test_typed_memory_is_accepted() -> None:
    staging = Staging(make_header([("a", "float32", (2, 2))]))
    values = memoryview(bytearray(16)).cast("I", (2, 2))
    staging.fill(0, values)
    staging.finish()
    assert staging.complete


def test_damage_is_refused_and_not_shown() -> None:
    source = produce(make_header([("a", "uint8", (64,))]))
    target = Staging(source.header)
    target.slot(0)[:] = bytes(64)
    with pytest.raises(IntegrityError, match="chunk 0"):
        target.put(0, chunk_head(source, 0).digest)
    assert target.num_ready == 0
    target.slot(0)[:] = source.slot(0)
    target.put(0, chunk_head(source, 0).digest)
    with pytest.raises(StateError, match="chunk 0 is already ready"):
        target.put(0, chunk_head(source, 0).digest)


@pytest.mark.parametrize("key", [b"", b"k"])
def test_chunks_of_another_snapshot_are_refused(key: bytes) -> None:
    first = produce(make_header([("a", "uint8", (64,))], version=1), key=key)
    second = Staging(make_header([("a", "uint8", (64,))], version=2), key=key)
    second.slot(0)[:] = first.slot(0)
    with pytest.raises(IntegrityError, match="chunk 0"):
        second.put(0, chunk_head(first, 0).digest)
    with pytest.raises(IntegrityError, match="root"):
        second.verify_trailer(trailer(first))
    with pytest.raises(IntegrityError, match="header"):
        second.authenticator.check_header(first.authenticator.header_auth)


def test_a_chunk_is_refused_at_another_index() -> None:
    source = Staging(make_header([("a", "uint8", (128,))]), key=b"k")
    source.fill(0, bytes(128))
    source.finish()
    target = Staging(source.header, key=b"k")
    target.buffer()[:] = bytes(128)
    with pytest.raises(IntegrityError, match="chunk 1"):
        target.put(1, chunk_head(source, 0).digest)


def test_partial_seeds_serve_all_chunks_together() -> None:
    header = make_header([("a", "uint8", (64 * 7 + 3,))])
    data, whole = content(header)["a"], produce(header, key=b"k")
    target = Staging(header, key=b"k")
    for part in range(3):
        seed = Staging(header, key=b"k", part=part, parts=3)
        seed.fill(0, data)
        seed.finish()
        assert list(seed.ready_since(0)) == list(range(part, 8, 3))
        assert trailer(seed).root == b""
        for index in seed.ready_since(0):
            target.slot(index)[:] = seed.slot(index)
            target.put(index, chunk_head(seed, index).digest)
    assert target.root == whole.root


def test_memory_is_shared_through_the_file_descriptor() -> None:
    staging = produce(make_header([("a", "uint8", (300,))]))
    with mmap.mmap(staging.memory.fd, 300, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == bytes(staging.buffer())


def test_memory_is_reused_when_no_reader_is_left() -> None:
    pool = SharedMemoryPool()
    first, second = pool.take(1000), pool.take(1000)
    taken = {first.fd, second.fd}
    reader = first.view[10:20]
    del first
    third = pool.take(1000)
    assert third.fd not in taken
    del second, third
    assert bytes(reader) == bytes(10)
    del reader
    assert pool.take(1000).fd in {*taken}


def num_pieces() -> int:
    """Shared memory of this process: each mapping has its own descriptor besides ours."""
    gc.collect()
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += "paceline-weights" in os.readlink(f"/proc/self/fd/{fd}")
    return count // 2


def test_at_most_two_snapshots_of_memory_are_kept() -> None:
    before = num_pieces()
    pool = SharedMemoryPool()
    pieces = [pool.take(1000) for _ in range(5)]
    assert num_pieces() == before + 5
    del pieces
    assert num_pieces() == before + 2
    del pool
    assert num_pieces() == before


async def test_a_wait_ends_in_time() -> None:
    staging = Staging(make_header([("a", "uint8", (128,))]))
    assert not await staging.wait(0, timeout_s=0.01)
    staging.fill(0, bytes(64))
    assert await staging.wait(0, timeout_s=0.01)
    assert not await staging.wait(1, timeout_s=0.01)


async def test_a_thread_fills_while_a_loop_waits() -> None:
    header = make_header([("a", "uint8", (64 * 50,))])
    staging, go = Staging(header), threading.Event()

    def work() -> None:
        go.wait(PATIENCE_S)
        for index in range(50):
            staging.fill(index * 64, bytes(64))
        staging.finish()

    thread = threading.Thread(target=work)
    thread.start()
    waits = [asyncio.create_task(staging.wait(index)) for index in range(51)]
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(asyncio.gather(*waits), PATIENCE_S)
    thread.join()
    assert staging.complete


async def test_waiting_on_an_abandoned_snapshot_ends() -> None:
    staging = Staging(make_header([("a", "uint8", (64,))]))
    waiting = asyncio.create_task(staging.wait(0))
    await asyncio.sleep(0)
    staging.abandon()
    with pytest.raises(StateError, match="abandoned"):
        await waiting
