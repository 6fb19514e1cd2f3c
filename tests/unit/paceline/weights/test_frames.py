"""Any bytes from a peer are either parsed within bounds or refused."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import IntegrityError
from paceline.v1 import weights_pb2 as pb
from paceline.weights import SnapshotHeader, plan
from paceline.weights.snapshot.manifest import header_to_proto
from paceline.weights.snapshot.verification import SnapshotAuthenticator
from paceline.weights.stream import frames
from paceline.weights.stream.frames import (
    ChunkFrame,
    ChunkRequest,
    Frame,
    HeaderFrame,
    TrailerFrame,
)

ENTRIES, TOTAL = plan([("a", "float32", (40, 8)), ("b", "int8", (3,))])
HEADER = SnapshotHeader("job", 7, 7, 6, -1, 1, TOTAL, 256, ENTRIES)
GOOD = [
    frames.header_frame(HEADER, bytes(32)),
    frames.chunk_frame(ChunkFrame(2, 256, bytes(32))),
    frames.chunk_frame(ChunkFrame(2, 12, bytes(32), 6)),
    frames.waiting_frame(3),
    frames.trailer_frame(TrailerFrame(bytes(32), bytes(32))),
]
LAST = HEADER.num_chunks - 1
LAST_BYTES = TOTAL - 256 * LAST


def parsed(body: bytes) -> Frame | None:
    try:
        return frames.parse(body)
    except IntegrityError:
        return None


@given(body=st.binary(max_size=300))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    parsed(body)
    try:
        request = frames.parse_request(body)
    except IntegrityError:
        return
    assert all(0 <= index < 1000 for index in request.indices(1000))


@given(data=st.data(), frame=st.sampled_from(GOOD))
def test_edited_frames_are_parsed_or_refused(data: st.DataObject, frame: bytes) -> None:
    body = bytearray(frame[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    found = parsed(bytes(body))
    if isinstance(found, HeaderFrame):
        # Accepted sizes must be consistent, since they determine allocations.
        header = found.header
        assert header.num_chunks <= 1 << 20
        assert all(
            0 <= t.offset <= t.offset + t.num_bytes <= header.num_bytes for t in header.tensors
        )


@given(
    index=st.integers(-(2**31), 2**31 - 1),
    num_bytes=st.integers(-(2**31), 2**31 - 1),
    base=st.none() | st.integers(-5, 9),
    asked=st.none() | st.integers(0, 9),
)
def test_only_chunks_that_fit_are_accepted(
    index: int, num_bytes: int, base: int | None, asked: int | None
) -> None:
    frame = ChunkFrame(index, num_bytes, bytes(32), base)
    assert frames.parse(frames.chunk_frame(frame)[4:]) == frame
    size = LAST_BYTES if index == LAST else 256
    fits = 0 <= index <= LAST and (
        num_bytes == size if base is None else base == asked and 0 < num_bytes < size
    )
    if fits:
        frames.check_chunk(frame, HEADER, base_version=asked)
    else:
        with pytest.raises(IntegrityError, match="chunk"):
            frames.check_chunk(frame, HEADER, base_version=asked)


@given(
    chunks=st.sets(st.integers(0, 99)),
    parts=st.integers(1, 5),
    base=st.none() | st.integers(0, 2**62),
    data=st.data(),
)
def test_requests_name_their_chunks(
    chunks: set[int], parts: int, base: int | None, data: st.DataObject
) -> None:
    part = data.draw(st.integers(0, parts - 1))
    wanted = frames.bitmap(sorted(chunks), 100) if chunks else b""
    request = frames.parse_request(frames.request_body(ChunkRequest(wanted, part, parts, base)))
    assert request.base_version == base
    expected = [i for i in range(100) if i % parts == part and (i in chunks or not chunks)]
    assert request.indices(100) == expected


@pytest.mark.parametrize(("first", "allowed"), [(True, 64 << 20), (False, 256)])
def test_long_frames_are_refused_before_they_are_read(first: bool, allowed: int) -> None:
    assert frames.parse_length(frames.LENGTH.pack(allowed), first=first) == allowed
    with pytest.raises(IntegrityError, match=f"a frame of {allowed + 1} bytes"):
        frames.parse_length(frames.LENGTH.pack(allowed + 1), first=first)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"chunk_bytes": 0}, "in chunks of 0"),
        ({"chunk_bytes": 9 << 20}, "the limit is"),
        ({"num_bytes": -1}, "header says -1 bytes"),
        ({"num_bytes": 1 << 62}, "the limit is 1048576 chunks"),
        ({"num_bytes": TOTAL - 1, "num_chunks": 6}, "tensor 'b'"),
        ({"num_chunks": 5}, "says 5 chunks"),
    ],
)
def test_a_header_that_lies_about_sizes_is_refused(change: dict[str, int], why: str) -> None:
    message = header_to_proto(HEADER)
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(IntegrityError, match=why):
        frames.parse(pb.StreamFrame(header=message).SerializeToString())


def test_a_digest_of_another_length_is_refused() -> None:
    head = pb.ChunkHead(index=0, num_bytes=256, digest=bytes(31))
    with pytest.raises(IntegrityError, match="a digest of 31 bytes"):
        frames.parse(pb.StreamFrame(chunk=head).SerializeToString())
    with pytest.raises(IntegrityError, match="unknown kind"):
        frames.parse(b"")


KEY = bytes(range(32))


def authenticated(message: pb.SnapshotHeader) -> bytes:
    """A frame as its sender writes it, whose digest covers every field that the sender knows."""
    body = message.SerializeToString(deterministic=True)
    secret = blake3(KEY, derive_key_context="paceline weights v2 header").digest()
    message.authentication = blake3(body, key=secret).digest()
    return pb.StreamFrame(header=message).SerializeToString()


def test_headers_of_other_releases_are_authentic_and_relayed_as_they_are() -> None:
    earlier = header_to_proto(HEADER)
    earlier.ClearField("names")
    earlier.canary.CopyFrom(pb.Canary(tokens=[1, 2], logprobs=[-0.5]))
    # A field that this release does not know: number 200, a text.
    later = pb.SnapshotHeader.FromString(
        header_to_proto(HEADER).SerializeToString() + b"\xc2\x0c\x03new"
    )
    for message in (earlier, later):
        sent = authenticated(message)
        frame = frames.parse(sent)
        assert isinstance(frame, HeaderFrame)
        SnapshotAuthenticator(frame.header, KEY).check_header(frame.authentication)
        assert frame.header == HEADER
        assert frames.header_frame(frame.header, frame.authentication)[4:] == sent
        with pytest.raises(IntegrityError, match="not authenticated"):
            SnapshotAuthenticator(frame.header, bytes(32)).check_header(frame.authentication)
