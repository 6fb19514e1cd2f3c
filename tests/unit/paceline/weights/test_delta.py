"""Deltas of chunks: exact for every dtype, safe for any bytes."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import IntegrityError, InvalidError
from paceline.weights.snapshot.delta import decode_into, encode, item_sizes
from paceline.weights.snapshot.manifest import ITEM_BYTES, SnapshotHeader, plan

SIZES = (1, 2, 4, 8)
# Quiet and signalling NaN with payloads, infinities, zeros of both signs, smallest and largest.
PECULIAR: dict[str, list[int]] = {
    "bfloat16": [0x7FC1, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x7F7F],
    "float16": [0x7E01, 0x7D01, 0xFFFF, 0x7C00, 0xFC00, 0x0000, 0x8000, 0x0001, 0x7BFF],
    "float32": [0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 1 << 31, 1],
    "float64": [0x7FF8 << 48 | 1, 0x7FF0 << 48 | 1, 2**64 - 1, 0x7FF << 52, 0, 1 << 63, 1],
    "float8_e4m3fn": [0x7F, 0xFF, 0x7E, 0x00, 0x80, 0x01],
    "float8_e5m2": [0x7D, 0x7F, 0xFF, 0x7C, 0xFC, 0x00, 0x80, 0x01],
}


def apply(payload: bytes, base: bytes, *, filled: int = 0xA5) -> bytes:
    """Decode between two guard regions, which must stay unchanged."""
    memory = bytearray([filled]) * (len(base) + 128)
    decode_into(payload, base, memoryview(memory)[64 : 64 + len(base)])
    assert memory[:64] == memory[-64:] == bytearray([filled]) * 64
    return bytes(memory[64:-64])


def moved(base: bytes, item_bytes: int, *, share: float, seed: int, far: bool = False) -> bytes:
    """The base with a share of its items changed, by one unit or arbitrarily."""
    rng = np.random.default_rng(seed)
    end = len(base) - len(base) % item_bytes
    items = np.frombuffer(base[:end], f"<u{item_bytes}").copy()
    chosen = rng.random(len(items)) < share
    drawn = rng.bytes(items.nbytes) if far else None
    ends = np.where(rng.random(len(items)) < 0.5, items + 1, items - 1)
    others = np.frombuffer(drawn, items.dtype) if drawn is not None else ends
    items[chosen] = others[chosen]
    return items.tobytes() + base[end:]


@given(
    size=st.integers(0, 5000),
    item_bytes=st.sampled_from(SIZES),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.24, 0.26, 1.0]),
    far=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_decoding_gives_the_bytes_back(
    size: int, item_bytes: int, share: float, far: bool, seed: int
) -> None:
    base = np.random.default_rng(seed).bytes(size)
    new = moved(base, item_bytes, share=share, seed=seed, far=far)
    payload = encode(new, base, item_bytes=item_bytes)
    if payload is not None:
        assert len(payload) < size
        assert apply(payload, base) == new
    elif not far and share < 0.25:
        assert size < 500  # too small for the frame to pay


@given(new=st.binary(max_size=300), base=st.binary(max_size=300), data=st.data())
def test_any_two_chunks_of_one_size(new: bytes, base: bytes, data: st.DataObject) -> None:
    size = min(len(new), len(base))
    payload = encode(new[:size], base[:size], item_bytes=data.draw(st.sampled_from(SIZES)))
    if payload is not None:
        assert apply(payload, base[:size]) == new[:size]


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("share", [0.02, 0.9])
def test_every_dtype_bit_by_bit(dtype: str, share: float) -> None:
    item_bytes = ITEM_BYTES[dtype]
    rng = np.random.default_rng(7)
    values = rng.integers(0, 1 << 7, 20_000, dtype=np.uint64).astype(f"<u{item_bytes}")
    values[:4] = (0, 1, (1 << 8 * item_bytes) - 1, 1 << 8 * item_bytes - 1)
    base = values.tobytes()
    new = moved(base, item_bytes, share=share, seed=8)
    payload = encode(new, base, item_bytes=item_bytes)
    assert payload is not None
    assert apply(payload, base) == new


@pytest.mark.parametrize("dtype", PECULIAR)
def test_bits_of_special_numbers_survive(dtype: str) -> None:
    item_bytes = ITEM_BYTES[dtype]
    peculiar = np.array(PECULIAR[dtype], dtype=f"<u{item_bytes}")
    pairs = np.array([(a, b) for a in peculiar for b in peculiar], dtype=peculiar.dtype)
    base = np.concatenate([np.zeros(4000, pairs.dtype), np.tile(pairs[:, 0], 20)]).tobytes()
    new = np.concatenate([np.zeros(4000, pairs.dtype), np.tile(pairs[:, 1], 20)]).tobytes()
    payload = encode(new, base, item_bytes=item_bytes)
    assert payload is not None
    assert apply(payload, base) == new


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_tiny_chunks_are_sent_as_they_are(size: int) -> None:
    assert encode(bytes(size), bytes(size), item_bytes=4) is None


@pytest.mark.parametrize("item_bytes", SIZES)
def test_an_unchanged_chunk_costs_next_to_nothing(item_bytes: int) -> None:
    base = np.random.default_rng(1).bytes((1 << 20) + 3)
    payload = encode(base, base, item_bytes=item_bytes)
    assert payload is not None
    assert len(payload) < 40
    assert apply(payload, base) == base


def test_random_bytes_are_sent_as_they_are() -> None:
    rng = np.random.default_rng(2)
    assert encode(rng.bytes(1 << 18), rng.bytes(1 << 18), item_bytes=2) is None


def test_chunks_of_several_dtypes_are_exact() -> None:
    tensors = [("a", "bfloat16", (70_001,)), ("b", "float32", (1_003,)), ("c", "int8", (99,))]
    tensors += [("d", "float64", (40_000,)), ("e", "float8_e5m2", (300_001,)), ("f", "bool", (0,))]
    entries, num_bytes = plan(tensors)
    header = SnapshotHeader("job", 2, 2, 1, -1, 1, num_bytes, 100_000, entries)
    rng = np.random.default_rng(3)
    base = bytearray(rng.integers(0, 90, num_bytes, dtype=np.uint8).tobytes())
    new = bytearray(base)
    for entry in entries:
        end = entry.offset + entry.num_bytes
        item = bytes(base[entry.offset : end])
        new[entry.offset : end] = moved(item, ITEM_BYTES[entry.dtype], share=0.05, seed=4)
    sizes = item_sizes(header)
    assert sizes == (2, 8, 8, 8, 8, 1, 1, 1)
    for index, item_bytes in enumerate(sizes):
        start, end = header.chunk_range(index)
        payload = encode(bytes(new[start:end]), bytes(base[start:end]), item_bytes=item_bytes)
        assert payload is not None
        assert apply(payload, bytes(base[start:end])) == new[start:end]


def test_chunks_without_any_tensor_have_bytes() -> None:
    assert item_sizes(SnapshotHeader("job", 1, 1, 0, -1, 1, 500, 256, ())) == (1, 1)


@pytest.mark.parametrize("item_bytes", [0, 3, 16, -2])
def test_items_of_another_size_are_refused(item_bytes: int) -> None:
    with pytest.raises(InvalidError, match="item_bytes"):
        encode(bytes(8), bytes(8), item_bytes=item_bytes)


@pytest.mark.parametrize("other", [0, 7, 8, 17])
def test_a_base_of_another_size_is_refused(other: int) -> None:
    payload = encode(bytes(1000), bytes(1000), item_bytes=4)
    assert payload is not None
    with pytest.raises(InvalidError, match="base"):
        encode(bytes(16), bytes(other), item_bytes=4)
    with pytest.raises(InvalidError, match="base"):
        decode_into(payload, bytes(other), memoryview(bytearray(16)))


@given(payload=st.binary(max_size=200), size=st.integers(0, 100))
def test_any_payload_is_safe(payload: bytes, size: int) -> None:
    with pytest.raises(IntegrityError):
        apply(payload, bytes(size))


@given(
    form=st.sampled_from([1, 2]),
    item_bytes=st.sampled_from(SIZES),
    count=st.one_of(st.integers(0, 80), st.integers(0, 2**32 - 1)),
    body=st.one_of(st.binary(max_size=300), st.integers(0, 300).map(bytes)),
    size=st.integers(0, 260),
)
def test_any_body_is_safe(form: int, item_bytes: int, count: int, body: bytes, size: int) -> None:
    payload = struct.pack("<BBI", form, item_bytes, count) + zstandard.compress(body)
    try:
        apply(payload, bytes(size))
    except IntegrityError:
        pass
    else:
        assert len(body) >= size % item_bytes


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_stays_within_the_chunk(at: int, bit: int, cut: bool) -> None:
    base = np.random.default_rng(5).bytes(30_000)
    payload = bytearray(encode(moved(base, 2, share=0.1, seed=6), base, item_bytes=2) or b"")
    at %= len(payload)
    if cut:
        del payload[at:]
    else:
        payload[at] ^= 1 << bit
    try:
        apply(bytes(payload), base)
    except IntegrityError:
        return
    assert not cut


def test_a_body_that_is_too_large_is_never_unpacked() -> None:
    bomb = zstandard.compress(bytes(1 << 28))
    with pytest.raises(IntegrityError, match="268435456 bytes where 1000 were expected"):
        apply(struct.pack("<BBI", 2, 1, 1000) + bomb, bytes(1000))


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    unsaid = compressor.compress(bytes(1 << 24))
    with pytest.raises(IntegrityError, match="were expected"):
        apply(struct.pack("<BBI", 2, 1, 1000) + unsaid, bytes(1000))
    frame = bytearray(zstandard.compress(np.random.default_rng(9).bytes(1000)))
    frame[5:7] = struct.pack("<H", 500 - 256)
    with pytest.raises(IntegrityError, match="unpacked"):
        apply(struct.pack("<BBI", 2, 1, 500) + bytes(frame), bytes(500))


def test_bytes_after_the_frame_are_refused() -> None:
    payload = encode(moved(bytes(1000), 4, share=0.1, seed=1), bytes(1000), item_bytes=4)
    assert payload is not None
    with pytest.raises(IntegrityError, match="unpacked"):
        apply(payload + b"more", bytes(1000))


def test_positions_outside_the_chunk_are_refused() -> None:
    body = np.array([70, 50], "<u4").view(np.uint8).reshape(2, 4).T.tobytes() + bytes(2)
    payload = struct.pack("<BBI", 1, 1, 2) + zstandard.compress(body)
    with pytest.raises(IntegrityError, match="reaches item 121 of 100"):
        apply(payload, bytes(100))


def test_threads_do_not_disturb_each_other() -> None:
    bases = [np.random.default_rng(seed).bytes(300_001) for seed in range(16)]
    news = [moved(base, 2, share=0.05, seed=seed) for seed, base in enumerate(bases)]

    def there_and_back(new: bytes, base: bytes) -> bytes:
        payload = encode(new, base, item_bytes=2)
        assert payload is not None
        return apply(payload, base)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(there_and_back, news * 4, bases * 4)) == news * 4
