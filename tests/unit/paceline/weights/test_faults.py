"""Peers that freeze, trickle, send false data, vanish or are slow, over real HTTP."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import IntegrityError, StateError
from paceline.types import PolicyVersion
from paceline.weights import SnapshotHeader, Staging, Transfer, WeightServer, plan, pull
from paceline.weights.route import ChunkSource, Route, TransferEvent, TransferReport
from paceline.weights.snapshot import delta
from paceline.weights.stream import frames
from paceline.weights.stream.frames import ChunkFrame, TrailerFrame
from paceline_harness.patience import PATIENCE_S

CHUNK = 2048
NUM_CHUNKS = 12
KEY = b"secret"
WAIT_S = PATIENCE_S
ENTRIES, TOTAL = plan([("a", "uint8", (CHUNK * NUM_CHUNKS - 7,))])
Send = Callable[[asyncio.StreamWriter], Awaitable[None]]


def make_header(version: int = 1) -> SnapshotHeader:
    return SnapshotHeader("job", version, version, version - 1, -1, 1, TOTAL, CHUNK, ENTRIES)


def content(version: int = 1) -> bytes:
    return b"".join(bytes([version, i % 251]) for i in range(TOTAL // 2 + 1))[:TOTAL]


def whole(version: int = 1, *, part: int = 0, parts: int = 1) -> Staging:
    staging = Staging(make_header(version), key=KEY, part=part, parts=parts)
    staging.fill(0, content(version))
    staging.finish()
    return staging


def chunk(source: Staging, index: int) -> bytes:
    return source.chunk_frame(index) + bytes(source.slot(index))


def body(source: Staging) -> bytes:
    chunks = b"".join(chunk(source, index) for index in range(NUM_CHUNKS))
    return source.header_frame() + chunks + source.trailer_frame()


@asynccontextmanager
async def serving(*stagings: Staging, bytes_per_s: float = 0.0) -> AsyncGenerator[str]:
    server = WeightServer(host="127.0.0.1", bytes_per_s=bytes_per_s)
    for staging in stagings:
        server.offer(staging)
    try:
        yield await server.start()
    finally:
        await server.close()


@asynccontextmanager
async def acting(send: Send) -> AsyncGenerator[str]:
    """A peer that answers every request with what `send` writes."""
    over, answers = asyncio.Event(), set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        current = asyncio.current_task()
        assert current is not None
        answers.add(current)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        sending, ending = asyncio.ensure_future(send(writer)), asyncio.ensure_future(over.wait())
        await asyncio.wait({sending, ending}, return_when=asyncio.FIRST_COMPLETED)
        sending.cancel()
        ending.cancel()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        answers.discard(current)

    server = await asyncio.start_server(answer, "127.0.0.1")
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        over.set()
        await asyncio.gather(*answers)


def saying(data: bytes) -> Send:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return send


def then_silent(data: bytes) -> Send:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await asyncio.Event().wait()

    return send


class Pulled:
    """A transfer and its reports."""

    def __init__(
        self, *endpoints: str, sources: tuple[ChunkSource, ...] = (), rate: float = 0.0
    ) -> None:
        self.made: list[Staging] = []
        self.reports: list[TransferReport] = []
        self.route = Route(
            PolicyVersion(version=1, step=1),
            sources or (ChunkSource(endpoints[0]),),
            fallbacks=endpoints if sources else endpoints[1:],
            bytes_per_s=rate,
            key=KEY,
        )
        self.transfer = Transfer(
            self.route, job_id="job", stage=self._into, report=self.reports.append
        )

    def _into(self, header: SnapshotHeader) -> Staging:
        self.made.append(Staging(header, key=KEY))
        return self.made[-1]

    async def run(self) -> Staging:
        async with asyncio.timeout(WAIT_S):
            staging = await self.transfer.run()
        assert bytes(staging.buffer()) == content()
        assert len(self.made) == 1
        return staging

    def events(self, endpoint: str) -> set[TransferEvent]:
        return {report.event for report in self.reports if report.endpoint == endpoint}

    def blames(self, endpoint: str) -> list[TransferReport]:
        """Reports other than the periodic ones on progress."""
        told = (report for report in self.reports if report.endpoint == endpoint)
        return [
            report
            for report in told
            if report.event not in (TransferEvent.MOVED, TransferEvent.DONE)
        ]

    def num_bytes(self, endpoint: str) -> int:
        return sum(report.num_bytes for report in self.reports if report.endpoint == endpoint)


async def test_chunks_of_a_frozen_peer_are_kept_and_the_rest_fetched_elsewhere() -> None:
    source = whole()
    sent = source.header_frame() + b"".join(chunk(source, index) for index in range(5))
    async with acting(then_silent(sent + chunk(source, 5)[:99])) as frozen, serving(source) as good:
        pulled = Pulled(frozen, good)
        await pulled.run()
    assert pulled.events(frozen) - {TransferEvent.MOVED} == {TransferEvent.STALLED}
    assert pulled.num_bytes(frozen) == 5 * CHUNK
    assert pulled.num_bytes(good) == TOTAL - 5 * CHUNK


async def test_a_peer_that_never_answers_is_abandoned() -> None:
    async with serving(whole()) as good:
        # Connections are accepted but never served, as by a frozen host.
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            pulled = Pulled(endpoint, good)
            await pulled.run()
    assert pulled.events(endpoint) == {TransferEvent.STALLED}


@asynccontextmanager
async def from_one_that_fills() -> AsyncGenerator[tuple[str, str, Pulled]]:
    """A pull in progress from a peer with three chunks and another with all.

    When the block ends, the first peer gets the rest, and the pull is awaited.
    """
    source = Staging(make_header(), key=KEY)
    source.fill(0, content()[: 3 * CHUNK])
    async with serving(source) as given, serving(whole()) as other:
        pulled = Pulled(given, other)
        running = asyncio.create_task(pulled.run())
        yield given, other, pulled
        assert not running.done()
        source.fill(3 * CHUNK, content()[3 * CHUNK :])
        source.finish()
        await running


async def test_keepalives_keep_a_starved_peer() -> None:
    async with from_one_that_fills() as (starved, other, pulled):
        await asyncio.sleep(0.8)
    assert pulled.events(other) == set()
    assert pulled.num_bytes(starved) == TOTAL


async def test_a_suspended_receiver_reports_no_peer() -> None:
    async with from_one_that_fills() as (given, other, pulled):
        for _ in range(5):
            await asyncio.sleep(0)
        time.sleep(1.5)  # while it asks
        async with asyncio.timeout(WAIT_S):
            while pulled.transfer.num_ready < 3:
                await asyncio.sleep(0.01)
        time.sleep(1.5)  # between two chunks
    assert pulled.blames(given) == []
    assert pulled.events(other) == set()


async def test_a_slow_peer_is_reported_and_replaced_by_a_new_route() -> None:
    data = body(whole())

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(data[:3000])
        for start in range(3000, len(data), 10):
            writer.write(data[start : start + 10])
            await asyncio.sleep(0.1)

    async with acting(drip) as slow, serving(whole()) as good:
        pulled = Pulled(slow, rate=1e6)
        running = asyncio.create_task(pulled.run())
        async with asyncio.timeout(WAIT_S):
            while TransferEvent.SLOW not in pulled.events(slow):
                await asyncio.sleep(0.02)
        assert not running.done()
        route = Route(PolicyVersion(version=1, step=1), (ChunkSource(good),), key=KEY)
        pulled.transfer.reroute(route)
        await running
    assert pulled.num_bytes(slow) == CHUNK
    assert pulled.num_bytes(good) == TOTAL - CHUNK


async def test_a_peer_with_damaged_bytes_is_asked_once() -> None:
    source, num_asked = whole(), 0
    damaged = bytearray(body(source))
    damaged[damaged.index(chunk(source, 4)) + 200] ^= 1

    async def send(writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        writer.write(damaged)

    half = Staging(make_header(), key=KEY)
    half.fill(0, content()[: 8 * CHUNK])
    async with acting(send) as bad, serving(half) as dying, serving(source) as good:
        pulled = Pulled(bad, dying, good)
        running = asyncio.create_task(pulled.run())
        async with asyncio.timeout(WAIT_S):
            while pulled.transfer.num_ready < 8:
                await asyncio.sleep(0.01)
        half.abandon()
        await running
    assert num_asked == 1
    (report,) = pulled.blames(bad)
    assert report.event == TransferEvent.DAMAGED
    assert "chunk 4 of version 1 differs from its digest" in report.detail
    assert pulled.num_bytes(dying) == 4 * CHUNK


async def test_a_peer_that_lacks_the_version_is_abandoned() -> None:
    async with serving() as empty, serving(whole(2)) as beyond, serving(whole()) as good:
        pulled = Pulled(empty, beyond, good)
        await pulled.run()
    assert pulled.events(empty) == {TransferEvent.FAILED}
    assert pulled.events(beyond) == {TransferEvent.MOVED}


async def test_partial_seeds_send_in_parallel_and_a_full_one_stands_in() -> None:
    seeds = [whole(part=part, parts=3) for part in range(3)]
    async with serving(seeds[0]) as a, serving(seeds[1]) as b, serving(whole()) as all_of_it:
        sources = (
            ChunkSource(a, 0, 3),
            ChunkSource(b, 1, 3),
            ChunkSource("http://127.0.0.1:9", 2, 3),
        )
        pulled = Pulled(all_of_it, sources=sources)
        staging = await pulled.run()
    assert staging.root == whole().root
    assert pulled.num_bytes(a) == pulled.num_bytes(b) == 4 * CHUNK
    assert pulled.num_bytes(all_of_it) == TOTAL - 8 * CHUNK


async def test_a_partial_seed_asked_for_too_much_is_replaced() -> None:
    async with serving(whole(part=1, parts=2)) as half, serving(whole()) as good:
        pulled = Pulled(half, good)
        await pulled.run()
    assert pulled.num_bytes(half) == pulled.num_bytes(good) - 7


async def test_a_seed_of_another_part_is_neither_fallback_nor_reported() -> None:
    first = Staging(make_header(), key=KEY)
    first.fill(0, content()[: 4 * CHUNK])
    async with serving() as never, serving(whole(part=1, parts=2)) as half:
        rank0 = WeightServer(host="127.0.0.1")
        rank0.offer(first)
        source = await rank0.start()
        pulled = Pulled(half, sources=(ChunkSource(source, 0, 2), ChunkSource(half, 1, 2)))
        pulled.transfer.stall_timeout_s = 10
        running = asyncio.create_task(pulled.run())
        async with asyncio.timeout(WAIT_S):
            while pulled.transfer.num_ready < 8:
                await asyncio.sleep(0.01)
        await rank0.close()
        async with asyncio.timeout(WAIT_S):
            while TransferEvent.FAILED not in pulled.events(source):
                await asyncio.sleep(0.01)
        pulled.transfer.reroute(
            Route(
                PolicyVersion(version=1, step=1),
                (ChunkSource(never, 0, 2), ChunkSource(half, 1, 2)),
                key=KEY,
            )
        )
        async with serving(whole()) as good:
            pulled.transfer.reroute(
                Route(
                    PolicyVersion(version=1, step=1),
                    (ChunkSource(good, 0, 2), ChunkSource(half, 1, 2)),
                    key=KEY,
                )
            )
            await running
    assert pulled.events(half) == {TransferEvent.MOVED}


@pytest.mark.parametrize("kind", ["cut off", "damaged", "frozen", "not held", "early end"])
async def test_failures_keep_no_snapshot_alive(kind: str) -> None:
    source = whole()
    damaged = bytearray(body(source))
    damaged[damaged.index(chunk(source, 4)) + 200] ^= 1
    sends = {
        "cut off": saying(body(source)[:9000]),
        TransferEvent.DAMAGED: saying(bytes(damaged)),
        "frozen": then_silent(body(source)[:9000]),
        "not held": saying(b""),
        "early end": saying(source.header_frame() + source.trailer_frame()),
    }
    gc.collect()
    gc.disable()
    try:
        async with acting(sends[kind]) as bad, serving() as empty, serving(source) as good:
            route = Route(
                PolicyVersion(version=1, step=1),
                (ChunkSource(empty if kind == "not held" else bad),),
                (good,),
                key=KEY,
            )
            transfer = Transfer(route, job_id="job", stage=lambda h: Staging(h, key=KEY))
            async with asyncio.timeout(WAIT_S):
                staging = weakref.ref(await transfer.run())
            del transfer
            async with asyncio.timeout(WAIT_S):
                while staging() is not None:
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_an_error_is_noticed_while_an_old_source_ends() -> None:
    entries, total = plan([("a", "uint8", (4 << 20,))])
    source = Staging(SnapshotHeader("job", 1, 1, 0, -1, 1, total, 2 << 20, entries), key=KEY)
    source.fill(0, bytes(total))
    source.finish()
    late, free, failing = asyncio.Event(), threading.Event(), list[str]()

    async def end(writer: asyncio.StreamWriter) -> None:
        await late.wait()

    def base(version: int) -> None:
        if failing:
            raise StateError(f"{failing.pop()} {version}")

    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(free.wait, WAIT_S)  # so that verification takes a while
        async with acting(end) as first, serving(source) as second, serving() as third:
            version, kept = PolicyVersion(version=1, step=1), ChunkSource(first, 0, 2)
            route = Route(version, (kept, ChunkSource(second, 1, 2)), base_version=0, key=KEY)
            transfer = Transfer(
                route,
                job_id="job",
                stage=lambda h: Staging(h, key=KEY),
                base=base,
                stall_timeout_s=60,
            )
            running = asyncio.create_task(transfer.run())
            await asyncio.sleep(0.4)
            transfer.reroute(replace(route, sources=(kept, ChunkSource(third, 1, 2))))
            await asyncio.sleep(0.1)
            failing.append("no base")
            late.set()
            await asyncio.sleep(0.4)
            free.set()
            with pytest.raises(StateError, match="no base 0"):
                async with asyncio.timeout(WAIT_S):
                    await running


async def test_a_peer_that_is_slow_to_answer_is_given_more_time() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1.3)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body(whole()))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    pulled = Pulled(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    pulled.transfer.stall_timeout_s = 20
    await pulled.run()
    server.close()


async def test_a_late_joiner_is_served_by_an_incomplete_peer() -> None:
    source, relay = Staging(make_header(), key=KEY), WeightServer(host="127.0.0.1")
    source.fill(0, content()[: 6 * CHUNK])

    def into(header: SnapshotHeader) -> Staging:
        return relay.stage(header, key=KEY)

    async with serving(source) as trainer:
        endpoint = await relay.start()
        first = asyncio.create_task(
            pull([trainer], job_id="job", version=1, stage=into, timeout_s=WAIT_S, key=KEY)
        )
        async with asyncio.timeout(WAIT_S):
            while not (found := relay.held("job", 1)) or found.num_ready < 6:
                await asyncio.sleep(0.01)
        joiner = Pulled(endpoint)
        running = asyncio.create_task(joiner.run())
        async with asyncio.timeout(WAIT_S):
            while joiner.transfer.num_ready < 6:
                await asyncio.sleep(0.01)
        source.fill(6 * CHUNK, content()[6 * CHUNK :])
        source.finish()
        await asyncio.gather(first, running)
        await relay.close()
    assert joiner.num_bytes(endpoint) == TOTAL


async def test_a_child_that_does_not_read_neither_blocks_others_nor_keeps_memory() -> None:
    entries, total = plan([("a", "uint8", (32 << 20,))])
    server = WeightServer(host="127.0.0.1")
    endpoint = await server.start()
    headers = [
        SnapshotHeader("job", v, v, v - 1, -1, 1, total, 1 << 20, entries) for v in (1, 2, 3)
    ]
    staging = server.stage(headers[0])
    request = b"POST /weights/job/1 HTTP/1.0\r\nContent-Length: 0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rpartition(":")[2]))
    writer.write(request)
    await reader.readuntil(b"\r\n\r\n")
    staging.fill(0, bytes(total))
    staging.finish()
    pulled = await pull([endpoint], job_id="job", version=1, stage=Staging, timeout_s=WAIT_S)
    assert pulled.complete
    first, memory = staging.memory.fd, weakref.ref(staging.buffer().obj)
    for header in headers[1:]:
        server.make_room("job", header.version)
        del staging
        async with asyncio.timeout(WAIT_S):
            while 1 not in server.versions() and memory() is not None:
                await asyncio.sleep(0.01)
        staging = server.stage(header)
        staging.fill(0, bytes(total))
        staging.finish()
    assert staging.memory.fd == first
    writer.close()
    await server.close()


def resized(
    source: Staging, index: int, num_bytes: int, *, base_version: int | None = None
) -> bytes:
    start, _ = source.header.chunk_range(index)
    digest = source.authenticator.digest(source.slot(index), index)
    data = bytes(source.buffer()[start : start + num_bytes])
    frame = ChunkFrame(index, num_bytes, digest, base_version)
    return source.header_frame() + frames.chunk_frame(frame) + data


def difference(source: Staging, payload: bytes) -> bytes:
    """A stream with these bytes as the delta of the first chunk against version 0."""
    frame = ChunkFrame(0, len(payload), _digest(source, 0), 0)
    return source.header_frame() + frames.chunk_frame(frame) + payload


def broken_differences() -> dict[str, bytes]:
    """Of the first chunk."""
    source, base = whole(), whole(0)
    good = delta.encode(source.slot(0), base.slot(0), item_bytes=1)
    wide = delta.encode(bytes(64 << 20), bytes([1]) + bytes((64 << 20) - 1), item_bytes=1)
    foreign = delta.encode(whole(2).slot(0), base.slot(0), item_bytes=1)
    assert good is not None
    assert wide is not None
    assert foreign is not None
    zeros = zstandard.compress(bytes(256 << 20))
    return {
        "flipped": bytes([*good[:-1], good[-1] ^ 1]),
        "cut": good[:-3],
        "of another version": foreign,
        "of more bytes": wide,
        "bomb": good[: delta.HEAD.size] + zeros[: CHUNK - 100],
        "no head": b"\x01",
    }


def lies() -> dict[str, tuple[bytes, str]]:
    """Invalid streams of a peer, with the expected errors."""
    source, other = whole(), whole(2)
    start, first = source.header_frame(), chunk(source, 0)
    trailer = TrailerFrame(bytes(32), bytes(32))
    return {
        "cut off": (body(source)[:9000], "ended the stream early"),
        "no header": (first, "does not begin with a header"),
        "two headers": (start + first + start, "a second header"),
        "another version": (body(other), "got 2 of job"),
        "another's chunk": (start + chunk(other, 0), "chunk 0 of version 1 differs"),
        "another place": (
            start + frames.chunk_frame(ChunkFrame(1, CHUNK, _digest(source, 0))) + first[-CHUNK:],
            "chunk 1 of version 1 differs",
        ),
        "twice": (start + first + first, "was sent twice"),
        "beyond": (start + frames.chunk_frame(ChunkFrame(99, CHUNK, bytes(32))), "chunk 99 of 12"),
        "short": (resized(source, 0, CHUNK - 1), "is sent as 2047"),
        "long": (resized(source, 0, CHUNK + 1), "is sent as 2049"),
        "unasked base": (resized(source, 0, 100, base_version=0), "None was requested"),
        "long frame": (start + struct.pack("<I", 1 << 31), "a frame of 2147483648 bytes"),
        "long header": (struct.pack("<I", 1 << 27), "a frame of 134217728 bytes"),
        "many keepalives": (start + frames.waiting_frame(1) * 500, "frames without a chunk"),
        "wrong root": (
            body(source)[: -len(source.trailer_frame())] + frames.trailer_frame(trailer),
            "root was not authenticated",
        ),
        "early end": (start + first + source.trailer_frame(), "does not hold all requested chunks"),
        "foreign key": (
            frames.header_frame(make_header(), bytes(32)),
            "not authenticated with this job's key",
        ),
    }


def _digest(source: Staging, index: int) -> bytes:
    return source.authenticator.digest(source.slot(index), index)


@pytest.mark.parametrize("lie", lies())
async def test_a_false_frame_is_named_and_another_peer_takes_over(lie: str) -> None:
    data, why = lies()[lie]
    async with acting(saying(data)) as bad, serving(whole()) as good:
        pulled = Pulled(bad, good)
        await pulled.run()
    (report,) = pulled.blames(bad)
    assert why in report.detail
    assert report.event == (
        TransferEvent.FAILED if lie in ("cut off", "early end") else TransferEvent.DAMAGED
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_edit_of_a_stream_still_yields_the_right_bytes(data: st.DataObject) -> None:
    sent = bytearray(body(whole()))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(sent) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat", "remove"]))
        size = data.draw(st.integers(1, 3000))
        if kind == "flip":
            sent[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del sent[max(at, 1) :]
        elif kind == "insert":
            sent[at:at] = data.draw(st.binary(max_size=8))
        elif kind == "repeat":
            sent[at:at] = sent[at : at + size]
        elif len(sent) > size:
            del sent[at : at + size]

    async def run() -> None:
        async with acting(saying(bytes(sent))) as bad, serving(whole()) as good:
            pulled = Pulled(bad, good)
            await pulled.run()
            assert pulled.num_bytes(good) <= TOTAL

    asyncio.run(run())


@pytest.mark.parametrize("kind", broken_differences())
async def test_a_broken_delta_is_refused_and_another_peer_sends_the_chunk(
    kind: str,
) -> None:
    source, base = whole(), whole(0)
    sent = saying(difference(source, broken_differences()[kind]))
    async with acting(sent) as bad, serving(source) as good:
        reports: list[TransferReport] = []
        route = Route(
            PolicyVersion(version=1, step=1), (ChunkSource(bad),), (good,), base_version=0, key=KEY
        )
        transfer = Transfer(
            route,
            job_id="job",
            stage=lambda header: Staging(header, key=KEY),
            base=lambda version: base if version == 0 else None,
            report=reports.append,
        )
        async with asyncio.timeout(WAIT_S):
            staging = await transfer.run()
    assert bytes(staging.buffer()) == content()
    told = [report.event for report in reports if report.endpoint == bad]
    assert [event for event in told if event != TransferEvent.MOVED] == [TransferEvent.DAMAGED]


async def test_without_other_peers_the_error_names_the_damage() -> None:
    source = whole()
    damaged = bytearray(body(source))
    damaged[-1] ^= 1
    damaged[len(damaged) // 2] ^= 1
    async with acting(saying(bytes(damaged))) as bad:
        with pytest.raises(IntegrityError, match=r"version 1 of job: weights: chunk \d+"):
            await Pulled(bad).run()
