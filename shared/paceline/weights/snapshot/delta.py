"""Lossless delta of one chunk against the same bytes of another version.

An optimiser step leaves most items of a low-precision tensor unchanged and changes the others by
a few units in the last place. So items are subtracted as wrapping integers, and the differences are
zigzag-encoded, which makes small changes of either sign small numbers. If few items changed, only
those are stored, each with the number of unchanged items before it (*sparse*), else all of them
(*dense*). Bytes of equal significance are grouped (*planes*) so that zstd compresses them well.

    payload  form (1 byte), item bytes (1), number of stored items (4), zstd frame of the body
    sparse   planes of the gaps (`uint32`), planes of the zigzagged differences, rest
    dense    planes of the zigzagged differences, rest

Numbers are little-endian; the rest is the bytes after the last whole item of the chunk. An item
size other than the tensor's makes a delta larger, never wrong. The functions are pure and run in
any number of threads; numpy and zstd release the GIL for all work proportional to the bytes.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from paceline.errors import IntegrityError, InvalidError
from paceline.weights.snapshot.manifest import ITEM_BYTES, SnapshotHeader

SPARSE = 1
DENSE = 2
HEAD = struct.Struct("<BBI")
GAP_BYTES = 4
# With more changed items the gaps take as much space as the zeros that they replace.
MAX_SPARSE_SHARE = 1 / 4
# Higher levels take longer and save next to nothing.
LEVEL = 1
# Items compared at a time, few enough that temporaries stay in the CPU cache.
BLOCK_ITEMS = 1 << 16

Buffer = bytes | bytearray | memoryview
Items = NDArray[Any]  # [items], unsigned, little-endian
Bytes = NDArray[np.uint8]


def encode(new: Buffer, base: Buffer, *, item_bytes: int) -> bytes | None:
    """The delta that turns `base` into `new`, or None if it is not smaller than `new`.

    `item_bytes` (1, 2, 4 or 8) is the size of most items of the chunk (`item_sizes`). Raises
    `InvalidError` when the buffers differ in size or `item_bytes` is another number.
    """
    if item_bytes not in (1, 2, 4, 8):
        raise InvalidError(f"weights: item_bytes {item_bytes} is not one of 1, 2, 4, 8")
    after, rest = _items(new, item_bytes)
    before, base_rest = _items(base, item_bytes)
    if len(after) != len(before) or len(rest) != len(base_rest):
        raise InvalidError(
            f"weights: {_num_bytes(new)} bytes against a base of {_num_bytes(base)} bytes"
        )
    positions = _changed(after, before)
    if len(positions) <= len(after) * MAX_SPARSE_SHARE:
        form, count = SPARSE, len(positions)
        gaps = np.diff(positions, prepend=-1) - 1
        parts = [
            _to_planes(gaps.astype("<u4")),
            _to_planes(_zigzag(after[positions] - before[positions])),
            rest,
        ]
    else:
        form, count = DENSE, len(after)
        parts = [_to_planes(_zigzag(after - before)), rest]
    body = np.concatenate(parts)
    packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(body.data)
    payload = HEAD.pack(form, item_bytes, count) + packed
    return payload if len(payload) < _num_bytes(new) else None


def decode_into(payload: Buffer, base: Buffer, target: memoryview) -> None:
    """Decode a delta against `base` into `target`, which must not overlap.

    The payload is untrusted: memory use stays within a few times the size of `target`. Raises
    `IntegrityError` for a payload that cannot belong to such a chunk, after which the content of
    `target` is undefined; only the digest of the chunk shows whether decoded bytes are right.
    Raises `InvalidError` when `base` and `target` differ in size.
    """
    if _num_bytes(base) != target.nbytes:
        raise InvalidError(
            f"weights: a base of {_num_bytes(base)} bytes for a chunk of {target.nbytes} bytes"
        )
    form, item_bytes, count = _head(payload)
    after, rest = _items(target, item_bytes)
    before, _ = _items(base, item_bytes)
    limit = int(len(after) * MAX_SPARSE_SHARE) if form == SPARSE else len(after)
    if count > limit or (form == DENSE and count < limit):
        raise IntegrityError(f"weights: a delta of {count} items for a chunk of {len(after)}")
    gap_bytes = count * GAP_BYTES if form == SPARSE else 0
    end = gap_bytes + count * item_bytes
    body = _unpack(memoryview(payload)[HEAD.size :], end + len(rest))
    zigzagged = _from_planes(body[gap_bytes:end], item_bytes)
    if form == SPARSE:
        positions = _positions(_from_planes(body[:gap_bytes], GAP_BYTES), len(after))
        after[:] = before
        after[positions] += _unzigzag(zigzagged)
    else:
        np.add(before, _unzigzag(zigzagged), out=after)
    rest[:] = body[end:]


def item_sizes(header: SnapshotHeader) -> tuple[int, ...]:
    """The predominant item size of each chunk, for `item_bytes` of `encode`."""
    sizes: list[Counter[int]] = [Counter() for _ in range(header.num_chunks)]
    for entry in header.tensors:
        end = entry.offset + entry.num_bytes
        for index in range(entry.offset // header.chunk_bytes, -(-end // header.chunk_bytes)):
            first, last = header.chunk_range(index)
            share = min(end, last) - max(entry.offset, first)
            sizes[index][ITEM_BYTES[entry.dtype]] += share
    return tuple(found.most_common(1)[0][0] if found else 1 for found in sizes)


def _head(payload: Buffer) -> tuple[int, int, int]:
    if len(payload) < HEAD.size:
        raise IntegrityError(f"weights: a delta of {len(payload)} bytes is too short")
    form, item_bytes, count = HEAD.unpack_from(payload)
    if form not in (SPARSE, DENSE) or item_bytes not in (1, 2, 4, 8):
        raise IntegrityError(f"weights: a delta of form {form} with items of {item_bytes} bytes")
    return form, item_bytes, count


def _unpack(packed: memoryview, size: int) -> Bytes:
    """The body; its declared size is checked before memory is allocated for it."""
    try:
        declared = zstandard.get_frame_parameters(packed).content_size
        if declared != size:
            raise IntegrityError(f"weights: a delta of {declared} bytes where {size} were expected")
        body = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"weights: a delta cannot be unpacked: {error}") from error
    if len(body) != size:
        raise IntegrityError(f"weights: a delta of {len(body)} bytes where {size} were expected")
    return np.frombuffer(body, np.uint8)


def _items(data: Buffer, item_bytes: int) -> tuple[Items, Bytes]:
    """The whole items of a buffer and the bytes after them, without a copy."""
    flat = np.frombuffer(data, np.uint8)
    end = len(flat) - len(flat) % item_bytes
    return flat[:end].view(f"<u{item_bytes}"), flat[end:]


def _changed(after: Items, before: Items) -> NDArray[np.int64]:
    """Positions where the two differ, ascending."""
    found = [
        np.flatnonzero(after[start : start + BLOCK_ITEMS] != before[start : start + BLOCK_ITEMS])
        + start
        for start in range(0, len(after), BLOCK_ITEMS)
    ]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _positions(gaps: Items, num_items: int) -> NDArray[np.int64]:
    """Positions from the gaps between them, ascending and checked to be below `num_items`."""
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(len(positions))
    if len(positions) and positions[-1] >= num_items:
        raise IntegrityError(f"weights: a delta reaches item {positions[-1]} of {num_items}")
    return positions


def _zigzag(differences: Items) -> Items:
    """Map 0, -1, 1, -2 (wrapped) to 0, 1, 2, 3."""
    return (differences << 1) ^ -(differences >> (8 * differences.itemsize - 1))


def _unzigzag(zigzagged: Items) -> Items:
    return (zigzagged >> 1) ^ -(zigzagged & 1)


def _to_planes(items: Items) -> Bytes:
    """Group the lowest bytes of all items, then the next lowest, and so on."""
    planes = np.empty((items.itemsize, len(items)), np.uint8)
    flat = items.view(np.uint8)
    for plane in range(items.itemsize):
        planes[plane] = flat[plane :: items.itemsize]
    return planes.reshape(-1)


def _from_planes(planes: Bytes, item_bytes: int) -> Items:
    flat = np.empty(len(planes), np.uint8)
    split = planes.reshape(item_bytes, -1)
    for plane in range(item_bytes):
        flat[plane::item_bytes] = split[plane]
    return flat.view(f"<u{item_bytes}")


def _num_bytes(data: Buffer) -> int:
    return memoryview(data).nbytes
