"""What a snapshot holds and where: header and trailer, as nouns and as framed messages."""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3
from google.protobuf.message import DecodeError, Message

from paceline.errors import IntegrityError, InvalidError
from paceline.v1 import weights_pb2 as pb

ALIGNMENT = 64
DIGEST_BYTES = 32
MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 8 << 20
MAX_FRAME_BYTES = 64 << 20
LENGTH = struct.Struct("<I")

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes `[offset, offset + num_bytes)` of the snapshot."""

    name: str
    dtype: str  # torch name without prefix
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a snapshot is and how it is cut; goes before the first chunk."""

    job_id: str
    version: int
    step: int
    parent_version: int
    base_version: int  # -1: full snapshot
    incarnation: int
    num_bytes: int
    chunk_bytes: int
    tensors: tuple[TensorEntry, ...]
    tied: tuple[tuple[str, str], ...] = ()  # (name, same_as)
    canary_tokens: tuple[int, ...] = ()
    canary_logprobs: tuple[float, ...] = ()  # of tokens[1:], temperature 1

    @property
    def num_chunks(self) -> int:
        """How many chunks; the last one may be short."""
        return -(-self.num_bytes // self.chunk_bytes)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """First and past-the-last byte of a chunk."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)


def plan(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
) -> tuple[tuple[TensorEntry, ...], int]:
    """Lay (name, dtype, shape) out one after the other; entries and total bytes."""
    entries: list[TensorEntry] = []
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise InvalidError(f"{name}: dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        entries.append(TensorEntry(name, dtype, tuple(shape), offset, num_bytes))
        end = offset + num_bytes
    return tuple(entries), end


def choose_chunk_bytes(
    num_bytes: int, *, receivers: int = 4, bytes_per_s: float = 1e9, setup_s: float = 2e-4
) -> int:
    """Chunk size with the least predicted time down a chain, within 256 KiB and 8 MiB.

    With n receivers the chain takes (n + k - 1) * (M / (k b) + tau), least at
    k = sqrt((n - 1) M / (b tau)).
    """
    best = math.sqrt(max(receivers - 1, 1) * num_bytes / (bytes_per_s * setup_s))
    size = math.ceil(num_bytes / max(best, 1.0) / ALIGNMENT) * ALIGNMENT
    return min(max(size, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


class Seals:
    """Digests of one snapshot, keyed if there is a key; without one they only detect damage.

    The key of the chunks is derived from the header, so that no chunk or trailer of another
    snapshot under the same key is accepted.
    """

    def __init__(self, header: Header, key: bytes) -> None:
        body = header_to(header).SerializeToString(deterministic=True)
        self.header_auth = b""
        self._key: bytes | None = None
        if key:
            secret = blake3(key, derive_key_context="paceline weights v1 header").digest()
            self.header_auth = blake3(body, key=secret).digest()
            context = "paceline weights v1 chunks"
            self._key = blake3(secret + self.header_auth, derive_key_context=context).digest()

    def digest(self, data: bytes | memoryview) -> bytes:
        """Digest of a chunk."""
        return self._hasher(data).digest()

    def root(self) -> blake3:
        """A hasher for the chunk digests in order."""
        return self._hasher(b"")

    def trailer_auth(self, root: bytes) -> bytes:
        """Authentication of the trailer; empty without a key."""
        return self._hasher(b"trailer" + root).digest() if self._key else b""

    def check_header(self, authentication: bytes) -> None:
        """Raise `IntegrityError` unless the header was sealed with this key."""
        if self._key and not hmac.compare_digest(authentication, self.header_auth):
            raise IntegrityError("weights: the header was not sealed with this job's key")

    def _hasher(self, data: bytes | memoryview) -> blake3:
        return blake3(data, key=self._key) if self._key else blake3(data)


def header_to(noun: Header) -> pb.SnapshotHeader:
    """Header as a message, not yet authenticated."""
    return pb.SnapshotHeader(
        job_id=noun.job_id,
        version=noun.version,
        step=noun.step,
        parent_version=noun.parent_version,
        base_version=noun.base_version,
        incarnation=noun.incarnation,
        num_bytes=noun.num_bytes,
        chunk_bytes=noun.chunk_bytes,
        num_chunks=noun.num_chunks,
        tensors=[
            pb.TensorEntry(
                name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, num_bytes=t.num_bytes
            )
            for t in noun.tensors
        ],
        tied=[pb.TiedTensor(name=name, same_as=same_as) for name, same_as in noun.tied],
        canary=pb.Canary(tokens=noun.canary_tokens, logprobs=noun.canary_logprobs),
    )


def header_from(message: pb.SnapshotHeader) -> Header:
    """Header from a message; raises `IntegrityError` when its numbers cannot be."""
    if message.chunk_bytes <= 0 or message.num_bytes < 0:
        raise IntegrityError(
            f"weights: header says {message.num_bytes} bytes in chunks of {message.chunk_bytes}"
        )
    header = Header(
        job_id=message.job_id,
        version=message.version,
        step=message.step,
        parent_version=message.parent_version,
        base_version=message.base_version,
        incarnation=message.incarnation,
        num_bytes=message.num_bytes,
        chunk_bytes=message.chunk_bytes,
        tensors=tuple(_entry_from(entry, message.num_bytes) for entry in message.tensors),
        tied=tuple((pair.name, pair.same_as) for pair in message.tied),
        canary_tokens=tuple(message.canary.tokens),
        canary_logprobs=tuple(message.canary.logprobs),
    )
    if header.num_chunks != message.num_chunks:
        raise IntegrityError(
            f"weights: header says {message.num_chunks} chunks, its sizes {header.num_chunks}"
        )
    return header


def _entry_from(message: pb.TensorEntry, total: int) -> TensorEntry:
    shape = tuple(message.shape)
    size = math.prod(shape) * ITEM_BYTES.get(message.dtype, -1)
    fits = message.offset >= 0 and message.offset + message.num_bytes <= total
    if min(shape, default=0) < 0 or size != message.num_bytes or not fits:
        raise IntegrityError(f"weights: header describes tensor {message.name!r} wrongly")
    return TensorEntry(message.name, message.dtype, shape, message.offset, message.num_bytes)


def frame(message: Message) -> bytes:
    """A message with its length before it."""
    body = message.SerializeToString(deterministic=True)
    return LENGTH.pack(len(body)) + body


def parse_header(body: bytes) -> tuple[Header, bytes]:
    """Header and its authentication from the body of a frame."""
    message = pb.SnapshotHeader()
    _parse(message, body)
    return header_from(message), message.authentication


def parse_chunk_head(body: bytes) -> tuple[int, int, bytes]:
    """Index, length and digest of the chunk that follows."""
    message = pb.ChunkHead()
    _parse(message, body)
    return message.index, message.num_bytes, message.digest


def parse_trailer(body: bytes) -> tuple[bytes, bytes]:
    """Root digest and authentication."""
    message = pb.SnapshotTrailer()
    _parse(message, body)
    return message.root, message.authentication


def _parse(message: Message, body: bytes) -> None:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise IntegrityError(f"weights: {message.DESCRIPTOR.name} cannot be read") from error
