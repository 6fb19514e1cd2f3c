from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
import uvloop

from paceline.errors import DeadlineError, IntegrityError, StateError, UnavailableError
from paceline.types import PolicyVersion
from paceline.weights import SnapshotHeader, Staging, WeightServer, plan, pull
from paceline.weights.route import ChunkSource, Route, TransferReport
from paceline.weights.stream.frames import ChunkRequest, bitmap, parse_request, request_body
from paceline.weights.transfer.version_transfer import Transfer
from paceline_harness.patience import PATIENCE_S

CHUNK = 4096
NUM_CHUNKS = 20
WAIT_S = PATIENCE_S
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def make_header(version: int = 1) -> SnapshotHeader:
    entries, total = plan([("a", "uint8", (CHUNK * NUM_CHUNKS - 7,))])
    return SnapshotHeader("job", version, version, version - 1, -1, 1, total, CHUNK, entries)


def chunk(index: int) -> bytes:
    return bytes([index + 1]) * (CHUNK - 7 * (index == NUM_CHUNKS - 1))


def fill(staging: Staging, start: int, end: int) -> None:
    for index in range(start, end):
        staging.fill(index * CHUNK, chunk(index))


def whole(version: int = 1, *, key: bytes = b"") -> Staging:
    staging = Staging(make_header(version), key=key)
    fill(staging, 0, NUM_CHUNKS)
    staging.finish()
    return staging


@asynccontextmanager
async def serving(*stagings: Staging) -> AsyncGenerator[tuple[WeightServer, str]]:
    server = WeightServer(host="127.0.0.1")
    for staging in stagings:
        server.offer(staging)
    endpoint = await server.start()
    try:
        yield server, endpoint
    finally:
        await server.close()


@asynccontextmanager
async def tampering(staging: Staging, edit: Callable[[bytearray], None]) -> AsyncGenerator[str]:
    """A peer whose response has been edited."""
    body = bytearray(staging.header_frame())
    for index in range(staging.header.num_chunks):
        body += staging.chunk_frame(index) + bytes(staging.slot(index))
    body += staging.trailer_frame()
    edit(body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def fetch(*endpoints: str, version: int = 1, timeout_s: float = WAIT_S) -> Staging:
    return await pull(endpoints, job_id="job", version=version, stage=Staging, timeout_s=timeout_s)


async def reached(staging: Callable[[], Staging | None], count: int) -> Staging:
    while True:
        found = staging()
        if found is not None and found.num_ready >= count:
            return found
        await asyncio.sleep(0.005)


async def test_pull_gives_the_same_bytes() -> None:
    source = whole()
    async with serving(source) as (_, endpoint):
        target = await fetch(endpoint)
    assert target.complete
    assert bytes(target.buffer()) == bytes(source.buffer())
    assert target.root == source.root


def test_pull_works_on_uvloop() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_pull_gives_the_same_bytes())


async def test_a_snapshot_without_bytes_travels() -> None:
    entries, total = plan([("empty", "float32", (0, 4))])
    source = Staging(SnapshotHeader("job", 1, 1, 0, -1, 1, total, CHUNK, entries))
    source.finish()
    async with serving(source) as (_, endpoint):
        target = await fetch(endpoint)
    assert [(entry.name, bytes(data)) for entry, data in target.tensors()] == [("empty", b"")]


async def test_any_http_client_can_read_it() -> None:
    source = whole()
    body = request_body(ChunkRequest(wanted=bitmap([3, 19], NUM_CHUNKS)))
    async with serving(source) as (_, endpoint), aiohttp.ClientSession() as http:
        async with http.post(f"{endpoint}/weights/job/1", data=body) as response:
            got = await response.read()
        expected = source.header_frame()
        for index in (3, 19):
            expected += source.chunk_frame(index) + bytes(source.slot(index))
        assert got == expected + source.trailer_frame()
        for path, data, status in (
            ("job/9", body, 404),
            ("job/0", body, 410),
            ("other/1", body, 404),
            ("job/1", b"\xff\xff", 400),
            ("job/1", request_body(ChunkRequest(part=3, parts=2)), 400),
        ):
            async with http.post(f"{endpoint}/weights/{path}", data=data) as response:
                assert response.status == status


FROZEN = 15  # chunks, and half of the next one


def with_frozen(version: int) -> Staging:
    """A version whose other chunks differ from those of every other version."""
    header = replace(make_header(version), frozen_bytes=FROZEN * CHUNK + CHUNK // 2)
    staging = Staging(header)
    fill(staging, 0, FROZEN)
    for index in range(FROZEN, NUM_CHUNKS):
        staging.fill(index * CHUNK, bytes([version]) * len(chunk(index)))
    staging.finish()
    return staging


async def receive(endpoint: str, version: int, *, held: Staging) -> tuple[Staging, int]:
    """A version as a holder of another one gets it, and the bytes on the network."""
    reports: list[TransferReport] = []
    route = Route(PolicyVersion(version, version), (ChunkSource(endpoint),))
    transfer = Transfer(
        route, job_id="job", stage=Staging, held=lambda: held, report=reports.append
    )
    found = await asyncio.wait_for(transfer.run(), WAIT_S)
    return found, sum(report.wire_bytes for report in reports)


async def test_frozen_bytes_are_not_sent_to_whoever_holds_them() -> None:
    first, second = with_frozen(1), with_frozen(2)
    async with serving(second) as (_, endpoint):
        relay, sent = await receive(endpoint, 2, held=first)
    assert bytes(relay.buffer()) == bytes(second.buffer())
    assert sent == second.header.num_bytes - FROZEN * CHUNK
    async with serving(relay) as (_, endpoint):
        found, sent = await receive(endpoint, 2, held=first)
        assert (found.root, sent) == (second.root, second.header.num_bytes - FROZEN * CHUNK)
        assert (await fetch(endpoint, version=2)).root == second.root  # and all to others


async def test_frozen_bytes_that_are_others_are_sent_after_all() -> None:
    """A restarted trainer may have another base model."""
    second = with_frozen(2)
    wrong = with_frozen(1)
    wrong.buffer()[3 * CHUNK] ^= 1
    entries, total = plan([("a", "uint8", (CHUNK * NUM_CHUNKS,))])
    other = replace(second.header, version=1, tensors=entries, num_bytes=total)
    larger = Staging(other)
    larger.fill(0, bytes(total))
    larger.finish()
    for held in (wrong, larger):
        async with serving(second) as (_, endpoint):
            found, sent = await receive(endpoint, 2, held=held)
        assert bytes(found.buffer()) == bytes(second.buffer())
        assert sent > second.header.num_bytes - FROZEN * CHUNK


async def test_three_peers_cut_through() -> None:
    source = Staging(make_header())
    made: list[Staging] = []
    async with serving(source) as (_, first), serving() as (b, second), serving() as (c, third):

        def relay(server: WeightServer) -> Callable[[SnapshotHeader], Staging]:
            def into(header: SnapshotHeader) -> Staging:
                made.append(Staging(header))
                server.offer(made[-1])
                return made[-1]

            return into

        fill(source, 0, 1)
        async with asyncio.TaskGroup() as tasks:
            for endpoint, into in ((first, relay(b)), (second, relay(c)), (third, Staging)):
                while c.versions() == [] and endpoint == third:
                    await asyncio.sleep(0.005)
                while b.versions() == [] and endpoint == second:
                    await asyncio.sleep(0.005)
                tasks.create_task(
                    pull([endpoint], job_id="job", version=1, stage=into, timeout_s=WAIT_S)
                )
            await asyncio.wait_for(made[-1].wait(0), WAIT_S)
            last = await reached(lambda: made[-1] if len(made) == 2 else None, 1)
            assert not source.complete
            assert bytes(last.slot(0)) == chunk(0)
            fill(source, 1, NUM_CHUNKS)
            source.finish()
    assert {staging.root for staging in made} == {source.root}


async def test_a_corrupt_byte_is_never_relayed() -> None:
    made: list[Staging] = []

    def into(header: SnapshotHeader) -> Staging:
        made.append(Staging(header))
        return made[-1]

    def edit(body: bytearray) -> None:
        body[body.index(chunk(3)) + 5] ^= 1

    async with tampering(whole(), edit) as endpoint:
        with pytest.raises(IntegrityError, match="chunk 3"):
            await pull([endpoint], job_id="job", version=1, stage=into, timeout_s=WAIT_S)
    assert list(made[0].ready_since(0)) == [0, 1, 2]
    assert not made[0].complete


async def test_after_a_corrupt_byte_another_peer_takes_over() -> None:
    def edit(body: bytearray) -> None:
        body[body.index(chunk(3)) + 5] ^= 1

    async with tampering(whole(), edit) as bad, serving(whole()) as (_, good):
        target = await fetch(bad, good)
    assert bytes(target.buffer()) == bytes(whole().buffer())


async def test_when_the_parent_dies_another_peer_sends_the_missing_chunks() -> None:
    half, made, asked = Staging(make_header()), list[Staging](), list[ChunkRequest]()
    fill(half, 0, 12)

    def into(header: SnapshotHeader) -> Staging:
        made.append(Staging(header))
        return made[-1]

    async with serving(half) as (dying, first), serving(whole()) as (_, second):

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].split()[0])
            body = await reader.readexactly(length)
            asked.append(parse_request(body))
            url = second + head.split()[1]
            async with aiohttp.ClientSession() as http, http.post(url, data=body) as response:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + await response.read())
            writer.close()

        server = await asyncio.start_server(proxy, "127.0.0.1")
        spare = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        pulling = asyncio.create_task(
            pull([first, spare], job_id="job", version=1, stage=into, timeout_s=WAIT_S)
        )
        await reached(lambda: made[0] if made else None, 12)
        await dying.close()
        target = await pulling
        server.close()
    assert len(made) == 1
    assert [request.indices(NUM_CHUNKS) for request in asked] == [list(range(12, NUM_CHUNKS))]
    assert bytes(target.buffer()) == bytes(whole().buffer())


async def test_an_abandoned_parent_disconnects_its_children() -> None:
    half = Staging(make_header())
    fill(half, 0, 5)
    async with serving(half) as (_, first), serving(whole()) as (_, second):
        pulling = asyncio.create_task(fetch(first, second))
        await asyncio.sleep(0.05)
        half.abandon()
        assert (await pulling).complete


@pytest.mark.parametrize(
    ("ours", "theirs", "error", "why"),
    [
        (b"a", b"b", UnavailableError, "refuses"),
        (b"", b"b", UnavailableError, "refuses"),
        (b"a", b"", IntegrityError, "not authenticated with this job's key"),
    ],
)
async def test_a_wrong_key_is_refused(
    ours: bytes, theirs: bytes, error: type[Exception], why: str
) -> None:
    made: list[SnapshotHeader] = []

    def into(header: SnapshotHeader) -> Staging:
        made.append(header)
        return Staging(header, key=ours)

    async with serving(whole(key=theirs)) as (_, endpoint):
        with pytest.raises(error, match=why):
            await pull([endpoint], job_id="job", version=1, stage=into, timeout_s=WAIT_S, key=ours)
    assert made == []


async def test_the_right_key_is_accepted() -> None:
    async with serving(whole(key=b"a")) as (_, endpoint):
        target = await pull(
            [endpoint],
            job_id="job",
            version=1,
            stage=lambda header: Staging(header, key=b"a"),
            timeout_s=WAIT_S,
            key=b"a",
        )
    assert target.complete


async def test_a_version_that_nobody_holds_fails() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
        async with serving(whole()) as (_, endpoint):
            with pytest.raises(UnavailableError, match="does not hold"):
                await fetch(dead, endpoint, version=2)


async def test_at_the_deadline_the_staging_is_abandoned() -> None:
    half, made = Staging(make_header()), list[Staging]()
    fill(half, 0, 5)

    def into(header: SnapshotHeader) -> Staging:
        made.append(Staging(header))
        return made[-1]

    async with serving(half) as (_, endpoint):
        with pytest.raises(DeadlineError) as caught:
            await pull([endpoint], job_id="job", version=1, stage=into, timeout_s=1.0)
    # On a busy machine not all five, or not even the header, may arrive within a second.
    num_ready = made[0].num_ready if made else 0
    assert num_ready <= 5
    assert f"({num_ready} chunks did)" in str(caught.value)
    for staging in made:
        with pytest.raises(StateError, match="abandoned"):
            await staging.wait(num_ready)


async def test_a_version_may_be_offered_late() -> None:
    async with serving() as (server, endpoint):
        pulling = asyncio.create_task(fetch(endpoint))
        await asyncio.sleep(0.1)
        server.offer(whole())
        assert (await pulling).complete


def test_two_newest_versions_are_kept() -> None:
    server = WeightServer(host="127.0.0.1")
    for version in (1, 2, 5, 3):
        server.offer(Staging(make_header(version)))
    assert server.versions() == [3, 5]


def test_a_version_pinned_by_an_eval_is_kept_too() -> None:
    server = WeightServer(host="127.0.0.1")
    for version, keep in ((1, 1), (2, 1), (3, 1), (4, -1)):
        server.offer(Staging(make_header(version)), keep=keep)
        if version == 3:
            assert server.versions() == [1, 2, 3]
    assert server.versions() == [3, 4]
