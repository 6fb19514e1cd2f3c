"""Frames around the chunks on the wire: built, and parsed with bounds on untrusted sizes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from paceline.errors import IntegrityError
from paceline.v1 import weights_pb2 as pb
from paceline.weights.snapshot.manifest import (
    MAX_CHUNKS,
    SnapshotHeader,
    header_from_proto,
    header_to_proto,
)
from paceline.weights.snapshot.verification import DIGEST_BYTES

LENGTH = struct.Struct("<I")
MAX_HEADER_BYTES = 64 << 20  # a header names every tensor
MAX_FRAME_BYTES = 256  # any other frame
MAX_REQUEST_BYTES = MAX_CHUNKS // 8 + 64


@dataclass(frozen=True, slots=True)
class HeaderFrame:
    """The first frame of a stream."""

    header: SnapshotHeader
    authentication: bytes


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """Precedes the `num_bytes` bytes of a chunk."""

    index: int
    num_bytes: int
    digest: bytes
    base_version: int | None = None  # the bytes are a delta against it; none: they are its own


@dataclass(frozen=True, slots=True)
class WaitingFrame:
    """A keepalive: the sender has no new chunk."""

    num_ready: int


@dataclass(frozen=True, slots=True)
class TrailerFrame:
    """Ends a stream. The root is empty if the sender does not hold all chunks."""

    root: bytes
    authentication: bytes


Frame = HeaderFrame | ChunkFrame | WaitingFrame | TrailerFrame


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Requests the chunks in the bitmap (empty: all) with `index % parts == part`."""

    wanted: bytes = b""
    part: int = 0
    parts: int = 1
    base_version: int | None = None
    held_version: int | None = None  # whose bytes may stand for those of frozen chunks

    def indices(self, num_chunks: int) -> list[int]:
        """The requested chunks of a snapshot of `num_chunks`."""
        in_part = range(self.part, num_chunks, self.parts)
        if not self.wanted:
            return list(in_part)
        size = len(self.wanted)
        return [i for i in in_part if i >> 3 < size and self.wanted[i >> 3] >> (i & 7) & 1]


def bitmap(indices: list[int], num_chunks: int) -> bytes:
    """Bit `i % 8` of byte `i / 8` for each index."""
    bits = bytearray(-(-num_chunks // 8))
    for index in indices:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def header_frame(header: SnapshotHeader, authentication: bytes) -> bytes:
    """A length-prefixed header."""
    message = header_to_proto(header)
    message.authentication = authentication
    return _frame(pb.StreamFrame(header=message))


def chunk_frame(frame: ChunkFrame) -> bytes:
    """The frame before the bytes of a chunk."""
    head = pb.ChunkHead(index=frame.index, num_bytes=frame.num_bytes, digest=frame.digest)
    if frame.base_version is not None:
        head.base_version = frame.base_version
    return _frame(pb.StreamFrame(chunk=head))


def waiting_frame(num_ready: int) -> bytes:
    """A keepalive with the number of chunks that the sender has."""
    return _frame(pb.StreamFrame(waiting=pb.Waiting(num_ready=num_ready)))


def trailer_frame(frame: TrailerFrame) -> bytes:
    """The last frame of a stream."""
    trailer = pb.SnapshotTrailer(root=frame.root, authentication=frame.authentication)
    return _frame(pb.StreamFrame(trailer=trailer))


def parse(body: bytes) -> Frame:
    """Parse a frame without its length prefix. Raises `IntegrityError`."""
    message = pb.StreamFrame()
    _parse(message, body)
    match message.WhichOneof("kind"):
        case "header":
            head = message.header
            return HeaderFrame(header_from_proto(head), head.authentication)
        case "chunk":
            return _chunk(message.chunk)
        case "waiting":
            return WaitingFrame(message.waiting.num_ready)
        case "trailer":
            return _trailer(message.trailer)
        case _:
            raise IntegrityError("weights: a frame of unknown kind")


def parse_length(data: bytes, *, first: bool) -> int:
    """The length of the next frame; only the first may be long. Raises `IntegrityError`."""
    (num_bytes,) = LENGTH.unpack(data)
    allowed = MAX_HEADER_BYTES if first else MAX_FRAME_BYTES
    if num_bytes > allowed:
        raise IntegrityError(f"weights: a frame of {num_bytes} bytes; the limit is {allowed}")
    return num_bytes


def check_chunk(
    frame: ChunkFrame,
    header: SnapshotHeader,
    *,
    base_version: int | None,
    held_version: int | None = None,
) -> None:
    """Raise `IntegrityError` unless a chunk frame fits this snapshot.

    A delta must be against the requested base, and smaller than the chunk. Only frozen chunks may
    have no bytes, if the receiver holds them.
    """
    if not 0 <= frame.index < header.num_chunks:
        raise IntegrityError(f"weights: chunk {frame.index} of {header.num_chunks}")
    start, end = header.chunk_range(frame.index)
    if frame.base_version is None:
        fits = frame.num_bytes == end - start
    elif not frame.num_bytes:
        fits = header.is_frozen(frame.index) and frame.base_version == held_version
    else:
        fits = 0 < frame.num_bytes < end - start
        if frame.base_version != base_version:
            raise IntegrityError(
                f"weights: chunk {frame.index} is a delta against version"
                f" {frame.base_version}, but {base_version} was requested"
            )
    if not fits:
        raise IntegrityError(
            f"weights: chunk {frame.index} of {end - start} bytes is sent as {frame.num_bytes}"
        )


def request_body(request: ChunkRequest) -> bytes:
    """The body of the POST for a request."""
    message = pb.PullRequest(wanted=request.wanted, part=request.part, parts=request.parts)
    if request.base_version is not None:
        message.base_version = request.base_version
    if request.held_version is not None:
        message.held_version = request.held_version
    return message.SerializeToString(deterministic=True)


def parse_request(body: bytes) -> ChunkRequest:
    """Parse the body of a POST. Raises `IntegrityError`."""
    message = pb.PullRequest()
    _parse(message, body)
    parts = message.parts or 1
    if not 0 <= message.part < parts:
        raise IntegrityError(f"weights: part {message.part} of {parts} parts")
    base = message.base_version if message.HasField("base_version") else None
    held = message.held_version if message.HasField("held_version") else None
    return ChunkRequest(message.wanted, message.part, parts, base, held)


def _chunk(head: pb.ChunkHead) -> ChunkFrame:
    if len(head.digest) != DIGEST_BYTES:
        raise IntegrityError(
            f"weights: chunk {head.index} has a digest of {len(head.digest)} bytes"
        )
    base = head.base_version if head.HasField("base_version") else None
    return ChunkFrame(head.index, head.num_bytes, head.digest, base)


def _trailer(message: pb.SnapshotTrailer) -> TrailerFrame:
    if len(message.root) not in (0, DIGEST_BYTES):
        raise IntegrityError(f"weights: a root of {len(message.root)} bytes")
    return TrailerFrame(message.root, message.authentication)


def _frame(message: Message) -> bytes:
    body = message.SerializeToString(deterministic=True)
    return LENGTH.pack(len(body)) + body


def _parse(message: Message, body: bytes) -> None:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise IntegrityError(f"weights: {message.DESCRIPTOR.name} cannot be read") from error
