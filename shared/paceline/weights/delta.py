"""Lossless difference of one chunk against the same bytes of another version.

After an optimiser step most items of a low-precision tensor are what they were, and the others
moved by a few units in the last place. So differences are taken between items read as integers,
wrapped, and folded so that small moves of either sign become small numbers (zigzag). If few items
changed, only these are kept, each with the number of unchanged ones before it (*sparse*), else all
items (*dense*). Either way the bytes of equal weight lie side by side (*planes*) for zstd to pack.

    payload  form (1 byte), item bytes (1), items kept (4), zstd frame of the body
    sparse   planes of the gaps (`uint32`), planes of the folded differences, rest
    dense    planes of the folded differences, rest

All numbers are little-endian; the rest is what the chunk has behind its last whole item. Items of
another size than the tensor's cost bytes, never exactness. Everything here is pure and may run in
any number of threads; numpy and zstd release the GIL in all that is proportional to the bytes.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from paceline.errors import IntegrityError, InvalidError
from paceline.weights.manifest import ITEM_BYTES, Header

SPARSE = 1
DENSE = 2
HEAD = struct.Struct("<BBI")
GAP_BYTES = 4
# With more items changed the gaps cost as much as the zeros that they stand for.
SPARSE_SHARE = 1 / 4
# Higher levels take longer and save next to nothing here.
LEVEL = 1
# Items looked at in one go: their temporaries stay in the cache.
BLOCK_ITEMS = 1 << 16

Buffer = bytes | bytearray | memoryview
Items = NDArray[Any]  # [items], unsigned, little-endian
Bytes = NDArray[np.uint8]


def encode(new: Buffer, base: Buffer, *, item_bytes: int) -> bytes | None:
    """Difference that turns `base` into `new`, or None when it is not smaller than `new`.

    `item_bytes` (1, 2, 4 or 8) is the size of most items of the chunk (`item_sizes`). Raises
    `InvalidError` when the sizes differ or `item_bytes` is another number.
    """
    if item_bytes not in (1, 2, 4, 8):
        raise InvalidError(f"weights: item_bytes {item_bytes} is not one of 1, 2, 4, 8")
    after, rest = _items(new, item_bytes)
    before, old_rest = _items(base, item_bytes)
    if len(after) != len(before) or len(rest) != len(old_rest):
        raise InvalidError(
            f"weights: {_num_bytes(new)} bytes against a base of {_num_bytes(base)} bytes"
        )
    places = _changed(after, before)
    if len(places) <= len(after) * SPARSE_SHARE:
        form, count = SPARSE, len(places)
        gaps = np.diff(places, prepend=-1) - 1
        parts = [_split(gaps.astype("<u4")), _split(_fold(after[places] - before[places])), rest]
    else:
        form, count = DENSE, len(after)
        parts = [_split(_fold(after - before)), rest]
    body = np.concatenate(parts)
    packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(body.data)
    payload = HEAD.pack(form, item_bytes, count) + packed
    return payload if len(payload) < _num_bytes(new) else None


def decode_into(payload: Buffer, base: Buffer, target: memoryview) -> None:
    """Write to `target` what was encoded against `base`, of the same size and apart from it.

    Any bytes may come as payload: memory stays within a few times the size of `target`. Raises
    `IntegrityError` for a payload that is none of such a chunk, after which `target` holds
    anything; whether the bytes are the right ones only the digest of the chunk tells. Raises
    `InvalidError` when `base` and `target` differ in size.
    """
    if _num_bytes(base) != target.nbytes:
        raise InvalidError(
            f"weights: a base of {_num_bytes(base)} bytes for a chunk of {target.nbytes} bytes"
        )
    form, item_bytes, count = _head(payload)
    after, rest = _items(target, item_bytes)
    before, _ = _items(base, item_bytes)
    limit = int(len(after) * SPARSE_SHARE) if form == SPARSE else len(after)
    if count > limit or (form == DENSE and count < limit):
        raise IntegrityError(f"weights: a delta of {count} items for a chunk of {len(after)}")
    gap_bytes = count * GAP_BYTES if form == SPARSE else 0
    moved = gap_bytes + count * item_bytes
    body = _unpack(memoryview(payload)[HEAD.size :], moved + len(rest))
    folded = _join(body[gap_bytes:moved], item_bytes)
    if form == SPARSE:
        places = _places(_join(body[:gap_bytes], GAP_BYTES), len(after))
        after[:] = before
        after[places] += _unfold(folded)
    else:
        np.add(before, _unfold(folded), out=after)
    rest[:] = body[moved:]


def item_sizes(header: Header) -> tuple[int, ...]:
    """Per chunk, the item size that most of its bytes have; the `item_bytes` of `encode`."""
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
        raise IntegrityError(f"weights: a delta of {len(payload)} bytes has no head")
    form, item_bytes, count = HEAD.unpack_from(payload)
    if form not in (SPARSE, DENSE) or item_bytes not in (1, 2, 4, 8):
        raise IntegrityError(f"weights: a delta of form {form} with items of {item_bytes} bytes")
    return form, item_bytes, count


def _unpack(packed: memoryview, size: int) -> Bytes:
    """The body, which has to say that it has `size` bytes before any are reserved for it."""
    try:
        said = zstandard.get_frame_parameters(packed).content_size
        if said != size:
            raise IntegrityError(f"weights: a delta of {said} bytes where {size} are due")
        body = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"weights: a delta cannot be unpacked: {error}") from error
    if len(body) != size:
        raise IntegrityError(f"weights: a delta of {len(body)} bytes where {size} are due")
    return np.frombuffer(body, np.uint8)


def _items(data: Buffer, item_bytes: int) -> tuple[Items, Bytes]:
    """The whole items of a buffer and the bytes behind them, without a copy."""
    flat = np.frombuffer(data, np.uint8)
    end = len(flat) - len(flat) % item_bytes
    return flat[:end].view(f"<u{item_bytes}"), flat[end:]


def _changed(after: Items, before: Items) -> NDArray[np.int64]:
    """Places where the two differ, ascending."""
    found = [
        np.flatnonzero(after[start : start + BLOCK_ITEMS] != before[start : start + BLOCK_ITEMS])
        + start
        for start in range(0, len(after), BLOCK_ITEMS)
    ]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _places(gaps: Items, num_items: int) -> NDArray[np.int64]:
    """Places from the gaps between them, each within `num_items` and greater than the last."""
    places = np.cumsum(gaps, dtype=np.int64)
    places += np.arange(len(places))
    if len(places) and places[-1] >= num_items:
        raise IntegrityError(f"weights: a delta reaches item {places[-1]} of {num_items}")
    return places


def _fold(moves: Items) -> Items:
    """Zigzag: 0, -1, 1, -2 (wrapped) become 0, 1, 2, 3."""
    return (moves << 1) ^ -(moves >> (8 * moves.itemsize - 1))


def _unfold(folded: Items) -> Items:
    return (folded >> 1) ^ -(folded & 1)


def _split(items: Items) -> Bytes:
    """Planes: the lowest bytes of all items, then the next ones."""
    planes = np.empty((items.itemsize, len(items)), np.uint8)
    flat = items.view(np.uint8)
    for plane in range(items.itemsize):
        planes[plane] = flat[plane :: items.itemsize]
    return planes.reshape(-1)


def _join(planes: Bytes, item_bytes: int) -> Items:
    flat = np.empty(len(planes), np.uint8)
    split = planes.reshape(item_bytes, -1)
    for plane in range(item_bytes):
        flat[plane::item_bytes] = split[plane]
    return flat.view(f"<u{item_bytes}")


def _num_bytes(data: Buffer) -> int:
    return memoryview(data).nbytes
