"""What surrounds the chunks on the wire: built, and parsed within bounds."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from paceline.errors import IntegrityError
from paceline.v1 import weights_pb2 as pb
from paceline.weights.manifest import MAX_CHUNKS, Header, header_from, header_to
from paceline.weights.seals import DIGEST_BYTES

LENGTH = struct.Struct("<I")
MAX_HEADER_BYTES = 64 << 20  # a header names every tensor
MAX_FRAME_BYTES = 256  # any other frame
MAX_REQUEST_BYTES = MAX_CHUNKS // 8 + 64


@dataclass(frozen=True, slots=True)
class HeaderFrame:
    """Goes first."""

    header: Header
    authentication: bytes


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """A chunk follows, in `num_bytes` bytes."""

    index: int
    num_bytes: int
    digest: bytes
    base_version: int | None = None  # the bytes are the difference against it


@dataclass(frozen=True, slots=True)
class WaitingFrame:
    """The sender lives and has nothing new."""

    num_ready: int


@dataclass(frozen=True, slots=True)
class TrailerFrame:
    """All that was asked for has been sent. The root is empty if the sender does not know it."""

    root: bytes
    authentication: bytes


Frame = HeaderFrame | ChunkFrame | WaitingFrame | TrailerFrame


@dataclass(frozen=True, slots=True)
class Request:
    """Which chunks: of those in the bitmap (empty: of all) those with `index % parts == part`."""

    wanted: bytes = b""
    part: int = 0
    parts: int = 1
    base_version: int | None = None

    def indices(self, num_chunks: int) -> list[int]:
        """The chunks asked for of a snapshot that has so many."""
        mine = range(self.part, num_chunks, self.parts)
        if not self.wanted:
            return list(mine)
        size = len(self.wanted)
        return [i for i in mine if i >> 3 < size and self.wanted[i >> 3] >> (i & 7) & 1]


def bitmap(indices: list[int], num_chunks: int) -> bytes:
    """Bit `i % 8` of byte `i / 8` for each index."""
    bits = bytearray(-(-num_chunks // 8))
    for index in indices:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def header_frame(header: Header, authentication: bytes) -> bytes:
    """A header with its length before it."""
    message = header_to(header)
    message.authentication = authentication
    return _frame(pb.StreamFrame(header=message))


def chunk_frame(frame: ChunkFrame) -> bytes:
    """What goes before the bytes of a chunk."""
    head = pb.ChunkHead(index=frame.index, num_bytes=frame.num_bytes, digest=frame.digest)
    if frame.base_version is not None:
        head.base_version = frame.base_version
    return _frame(pb.StreamFrame(chunk=head))


def waiting_frame(num_ready: int) -> bytes:
    """The sender lives and has so many chunks."""
    return _frame(pb.StreamFrame(waiting=pb.Waiting(num_ready=num_ready)))


def trailer_frame(frame: TrailerFrame) -> bytes:
    """The end."""
    trailer = pb.SnapshotTrailer(root=frame.root, authentication=frame.authentication)
    return _frame(pb.StreamFrame(trailer=trailer))


def parse(body: bytes) -> Frame:
    """A frame from what follows its length. Raises `IntegrityError`."""
    message = pb.StreamFrame()
    _parse(message, body)
    match message.WhichOneof("kind"):
        case "header":
            head = message.header
            return HeaderFrame(header_from(head), head.authentication)
        case "chunk":
            return _chunk(message.chunk)
        case "waiting":
            return WaitingFrame(message.waiting.num_ready)
        case "trailer":
            return _trailer(message.trailer)
        case _:
            raise IntegrityError("weights: a frame of no known kind")


def parse_length(data: bytes, *, first: bool) -> int:
    """Bytes of the frame that follows; only the first may be long. Raises `IntegrityError`."""
    (num_bytes,) = LENGTH.unpack(data)
    allowed = MAX_HEADER_BYTES if first else MAX_FRAME_BYTES
    if num_bytes > allowed:
        raise IntegrityError(f"weights: a frame of {num_bytes} bytes, allowed are {allowed}")
    return num_bytes


def check_chunk(frame: ChunkFrame, header: Header, *, base_version: int | None) -> None:
    """Raise `IntegrityError` unless such a chunk can be of this snapshot.

    A difference has to be against the base that was asked for, and smaller than the chunk.
    """
    if not 0 <= frame.index < header.num_chunks:
        raise IntegrityError(f"weights: chunk {frame.index} of {header.num_chunks}")
    start, end = header.chunk_range(frame.index)
    if frame.base_version is None:
        fits = frame.num_bytes == end - start
    else:
        fits = 0 < frame.num_bytes < end - start
        if frame.base_version != base_version:
            raise IntegrityError(
                f"weights: chunk {frame.index} is a difference against version"
                f" {frame.base_version}, asked for was {base_version}"
            )
    if not fits:
        raise IntegrityError(
            f"weights: chunk {frame.index} of {end - start} bytes comes in {frame.num_bytes}"
        )


def request_body(request: Request) -> bytes:
    """A request as the body of a POST."""
    message = pb.PullRequest(wanted=request.wanted, part=request.part, parts=request.parts)
    if request.base_version is not None:
        message.base_version = request.base_version
    return message.SerializeToString(deterministic=True)


def parse_request(body: bytes) -> Request:
    """A request from the body of a POST. Raises `IntegrityError`."""
    message = pb.PullRequest()
    _parse(message, body)
    parts = message.parts or 1
    if not 0 <= message.part < parts:
        raise IntegrityError(f"weights: part {message.part} of {parts} parts")
    base = message.base_version if message.HasField("base_version") else None
    return Request(message.wanted, message.part, parts, base)


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
