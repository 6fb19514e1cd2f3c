from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import IntegrityError, InvalidError, StateError
from paceline.weights import Header, Staging, choose_chunk_bytes, plan
from paceline.weights.manifest import (
    ITEM_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    parse_chunk_head,
    parse_header,
    parse_trailer,
)

Spec = tuple[str, str, tuple[int, ...]]
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), max_size=8).map(
    lambda found: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(found)]
)


def make_header(tensors: Sequence[Spec], *, chunk_bytes: int = 64, version: int = 3) -> Header:
    entries, total = plan(tensors)
    return Header(
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
        canary_tokens=(1, 2, 3),
        canary_logprobs=(-0.5, -1.25),
    )


def content(header: Header) -> dict[str, bytes]:
    return {
        t.name: bytes((i * 31 + k) % 251 for k in range(t.num_bytes))
        for i, t in enumerate(header.tensors)
    }


def produce(header: Header, *, key: bytes = b"") -> Staging:
    staging, data = Staging(header, key=key), content(header)
    for entry in header.tensors:
        staging.fill(entry.offset, data[entry.name])
    staging.finish()
    return staging


def receive(source: Staging, *, key: bytes = b"") -> Staging:
    header, _ = parse_header(source.header_frame()[4:])
    target = Staging(header, key=key)
    for index in range(header.num_chunks):
        at, size, digest = parse_chunk_head(source.chunk_frame(index)[4:])
        assert (at, size) == (index, source.slot(index).nbytes)
        target.put(index, source.slot(index), digest)
    target.confirm(*parse_trailer(source.trailer_frame()[4:]))
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


@given(specs=SPECS, chunk_bytes=st.integers(1, 300), key=st.sampled_from([b"", b"secret"]))
def test_what_is_produced_is_received(specs: list[Spec], chunk_bytes: int, key: bytes) -> None:
    source = produce(make_header(specs, chunk_bytes=chunk_bytes), key=key)
    target = receive(source, key=key)
    assert target.header == source.header
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


def test_bytes_left_out_are_noticed() -> None:
    staging = Staging(make_header([("a", "uint8", (200,)), ("b", "uint8", (8,))]))
    with pytest.raises(StateError, match="bytes 0 to 256"):
        staging.fill(256, bytes(8))
    with pytest.raises(StateError):
        staging.finish()


def test_chunks_are_ready_as_soon_as_they_are_whole() -> None:
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
    staging = Staging(make_header([("a", "uint8", (64,))]))
    with pytest.raises(IntegrityError, match="chunk 0"):
        staging.put(0, memoryview(bytes(64)), blake3(b"other").digest())
    assert staging.num_ready == 0
    staging.put(0, memoryview(bytes(64)), blake3(bytes(64)).digest())
    with pytest.raises(IntegrityError, match="root"):
        staging.confirm(bytes(32), b"")
    assert not staging.complete


def test_chunk_of_another_snapshot_is_refused_under_the_same_key() -> None:
    first = produce(make_header([("a", "uint8", (64,))], version=1), key=b"k")
    second = Staging(make_header([("a", "uint8", (64,))], version=2), key=b"k")
    _, _, digest = parse_chunk_head(first.chunk_frame(0)[4:])
    with pytest.raises(IntegrityError):
        second.put(0, first.slot(0), digest)


async def test_a_thread_fills_while_a_loop_waits() -> None:
    header = make_header([("a", "uint8", (64 * 50,))])
    staging, go = Staging(header), threading.Event()

    def work() -> None:
        go.wait(10)
        for index in range(50):
            staging.fill(index * 64, bytes(64))
        staging.finish()

    thread = threading.Thread(target=work)
    thread.start()
    waits = [asyncio.create_task(staging.wait(index)) for index in range(51)]
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(asyncio.gather(*waits), 10)
    thread.join()
    assert staging.complete


async def test_waiting_on_an_abandoned_snapshot_ends() -> None:
    staging = Staging(make_header([("a", "uint8", (64,))]))
    waiting = asyncio.create_task(staging.wait(0))
    await asyncio.sleep(0)
    staging.abandon()
    with pytest.raises(StateError, match="abandoned"):
        await waiting
