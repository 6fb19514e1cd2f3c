"""A worker that follows its routes: versions, deltas, held snapshots."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from paceline.platform.telemetry.metrics import Metrics
from paceline.types import PolicyVersion
from paceline.weights import Receiver, SnapshotHeader, Staging, Transfer, WeightServer, plan
from paceline.weights.route import ChunkSource, Route, TransferReport
from paceline_harness.patience import PATIENCE_S

CHUNK = 4096
NUM_CHUNKS = 20
KEY = b"secret"


def make_header(version: int) -> SnapshotHeader:
    entries, total = plan([("a", "bfloat16", (CHUNK * NUM_CHUNKS // 2 - 3,))])
    return SnapshotHeader("job", version, version, version - 1, -1, 1, total, CHUNK, entries)


def content(version: int) -> bytes:
    """Few bytes change from one version to the next."""
    chance = random.Random(5)
    data = bytearray(chance.randbytes(make_header(0).num_bytes))
    for _ in range(version * 50):
        data[chance.randrange(len(data))] ^= 1
    return bytes(data)


def fill(staging: Staging, start: int, end: int) -> None:
    data = content(staging.header.version)
    for index in range(start, end):
        staging.fill(index * CHUNK, data[index * CHUNK : (index + 1) * CHUNK])


def seed(
    server: WeightServer, version: int, num_chunks: int = NUM_CHUNKS, *, chunk_bytes: int = CHUNK
) -> Staging:
    header = replace(make_header(version), chunk_bytes=chunk_bytes)
    staging = server.stage(header, key=KEY)
    fill(staging, 0, num_chunks)
    if num_chunks == NUM_CHUNKS:
        staging.finish()
    return staging


class Worker:
    """A receiver with its server and its reports."""

    def __init__(self, name: str, *, bytes_per_s: float = 0.0) -> None:
        self.endpoint = ""
        self.metrics = Metrics()
        self.server = WeightServer(host="127.0.0.1", metrics=self.metrics)
        self.reports: list[TransferReport] = []
        self.heard: Callable[[TransferReport], None] = lambda report: None
        self.versions: list[int] = []
        self.memory: list[int] = []
        self.receiver = Receiver(
            job_id="job",
            worker_id=name,
            server=self.server,
            report=self._report,
            complete=self._complete,
            metrics=self.metrics,
            bytes_per_s=bytes_per_s,
        )

    def _report(self, report: TransferReport) -> None:
        self.reports.append(report)
        self.heard(report)

    def _complete(self, staging: Staging) -> None:
        assert bytes(staging.buffer()) == content(staging.header.version)
        self.versions.append(staging.header.version)
        self.memory.append(os.fstat(staging.memory.fd).st_ino)

    def follow(self, version: int, *endpoints: str, base: int = -1, rate: float = 0.0) -> None:
        first, *others = endpoints
        self.receiver.route(
            Route(
                PolicyVersion(version=version, step=version),
                (ChunkSource(first),),
                fallbacks=tuple(others),
                base_version=base,
                bytes_per_s=rate,
                key=KEY,
            )
        )

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"job": "job", **labels}) or 0.0


@asynccontextmanager
async def working(*workers: Worker) -> AsyncGenerator[tuple[WeightServer, str]]:
    """Run the workers; yields a server of seeds and its endpoint."""
    trainer = WeightServer(host="127.0.0.1")
    endpoint = await trainer.start()
    for worker in workers:
        worker.endpoint = await worker.server.start()
    tasks = [asyncio.create_task(worker.receiver.run()) for worker in workers]
    try:
        yield trainer, endpoint
    finally:
        for worker in workers:
            await worker.receiver.close()
            await worker.server.close()
        assert all(task.done() for task in tasks)
        await trainer.close()


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not found():
            await asyncio.sleep(0.005)


async def test_versions_are_followed_in_order_and_relayed() -> None:
    near, far = Worker("near"), Worker("far")
    async with working(near, far) as (trainer, endpoint):
        for version in (1, 2, 3):
            near.follow(version, endpoint)
            far.follow(version, near.endpoint, endpoint)
            seed(trainer, version)
            await until(lambda version=version: far.versions[-1:] == [version])
    assert near.versions == far.versions == [1, 2, 3]
    assert {report.endpoint for report in far.reports} == {near.endpoint}
    assert far.reports[-1].event == "done"
    assert far.reports[-1].num_ready == far.reports[-1].num_chunks == NUM_CHUNKS
    num_bytes = sum(report.num_bytes for report in far.reports)
    assert num_bytes == 3 * make_header(1).num_bytes
    assert near.count("paceline_weight_bytes_total", direction="in", kind="full") == num_bytes
    assert near.count("paceline_weight_bytes_total", direction="out", kind="full") == num_bytes
    assert near.count("paceline_weight_version", state="held") == 3


@pytest.mark.parametrize("chunk_bytes", [CHUNK, CHUNK * 3 // 2])
async def test_deltas_are_relayed_down_a_chain(chunk_bytes: int) -> None:
    near, far = Worker("near"), Worker("far")
    async with working(near, far) as (trainer, endpoint):
        for version in (1, 2):
            near.follow(version, endpoint, base=version - 1)
            far.follow(version, near.endpoint, base=version - 1)
            seed(trainer, version, chunk_bytes=CHUNK if version == 1 else chunk_bytes)
            await until(lambda version=version: far.versions[-1:] == [version])
    for worker in (near, far):
        second = [report for report in worker.reports if report.version == 2]
        assert {report.base_version for report in second if report.wire_bytes} == {1}
        wire_bytes = sum(report.wire_bytes for report in second)
        assert 0 < wire_bytes < sum(report.num_bytes for report in second) / 4
        assert worker.count("paceline_weight_bytes_total", direction="in", kind="delta") > 0
        assert worker.count("paceline_weight_seconds_total", stage="encode") == 0


async def test_a_receiver_without_the_base_gets_full_chunks() -> None:
    worker, joiner = Worker("worker"), Worker("joiner")
    async with working(worker, joiner) as (trainer, endpoint):
        seed(trainer, 1)
        worker.follow(1, endpoint)
        await until(lambda: worker.versions == [1])
        seed(trainer, 2)
        worker.follow(2, endpoint, base=1)
        joiner.follow(2, worker.endpoint, base=1)
        await until(lambda: joiner.versions == [2] and worker.versions == [1, 2])
    assert joiner.count("paceline_weight_bytes_total", direction="in", kind="delta") == 0
    assert worker.count("paceline_weight_bytes_total", direction="in", kind="delta") > 0


@pytest.mark.parametrize(("num_ready", "finished"), [(9, [2]), (10, [1, 2])])
async def test_a_newer_version_supersedes_one_less_than_half_received(
    num_ready: int, finished: list[int]
) -> None:
    worker = Worker("worker")

    def superseded() -> float:
        return worker.count("paceline_weight_events_total", event="superseded")

    async with working(worker) as (trainer, endpoint):
        old = seed(trainer, 1, num_ready)
        worker.follow(1, endpoint)
        await until(lambda: [p.num_ready for p in worker.receiver.progress()] == [num_ready])
        assert worker.receiver.progress()[0].sources == (endpoint,)
        trainer.offer(seed(WeightServer(host="127.0.0.1"), 2))
        worker.follow(2, endpoint)
        if 1 in finished:
            await asyncio.sleep(0.05)
        else:
            await until(lambda: superseded() == 1)
        fill(old, num_ready, NUM_CHUNKS)
        old.finish()
        await until(lambda: worker.versions == finished)
    assert superseded() == 2 - len(finished)


async def test_a_child_waits_for_chunks_its_parent_waits_for() -> None:
    near, far = Worker("near"), Worker("far")
    trainer = WeightServer(host="127.0.0.1")
    async with working(near, far) as (_, elsewhere):
        far.follow(1, near.endpoint, elsewhere)
        near.follow(1, late := await trainer.start())
        await asyncio.sleep(1.5)
        assert far.receiver.progress()[0].sources == (near.endpoint,)
        seed(trainer, 1)
        await until(lambda: near.versions == far.versions == [1])
    assert {report.event for report in near.reports if report.endpoint == late} >= {"done"}
    # Progress is reported every second.
    assert [report.event for report in far.reports if report.event != "moved"] == ["done"]
    await trainer.close()


async def test_never_two_versions_in_a_row_are_superseded() -> None:
    worker = Worker("worker")
    async with working(worker) as (trainer, endpoint):
        stagings: list[Staging] = []
        for version in (1, 2, 3):
            stagings.append(Staging(make_header(version), key=KEY))
            fill(stagings[-1], 0, 5)
            trainer.offer(stagings[-1])
            worker.follow(version, endpoint)
            started = {1: 1, 2: 2, 3: 2}[version]
            await until(
                lambda started=started: (
                    [(p.version, p.num_ready) for p in worker.receiver.progress()] == [(started, 5)]
                )
            )
            await asyncio.sleep(0.05)
        fill(stagings[1], 5, NUM_CHUNKS)
        stagings[1].finish()
        await until(lambda: worker.versions == [2])
        fill(stagings[2], 5, NUM_CHUNKS)
        stagings[2].finish()
        await until(lambda: worker.versions == [2, 3])


async def test_a_worker_overtaken_by_four_publications_completes_a_version() -> None:
    metrics, worker = Metrics(), Worker("worker")
    num_bytes = make_header(0).num_bytes
    trainer = WeightServer(
        host="127.0.0.1", metrics=metrics, bytes_per_s=4 * num_bytes, keep_streaming=True
    )
    endpoint = await trainer.start()

    def sent() -> float:
        labels = {"job": "job", "direction": "out", "kind": "full"}
        return metrics.registry.get_sample_value("paceline_weight_bytes_total", labels) or 0.0

    async with working(worker):
        for version in range(20):
            seed(trainer, version)
            assert len(trainer.versions()) <= 3
            worker.follow(version, endpoint)
            before = sent()
            await until(lambda before=before: sent() - before >= num_bytes / 4)
        assert len(worker.versions) >= 2
    await trainer.close()


async def test_a_version_without_receivers_is_dropped() -> None:
    now, worker = [0.0], Worker("worker")
    trainer = WeightServer(host="127.0.0.1", keep_streaming=True, clock=lambda: now[0])
    endpoint = await trainer.start()
    async with working(worker):
        seed(trainer, 1, 12)  # more than half, so the worker completes it
        worker.follow(1, endpoint)
        await until(lambda: [p.num_ready for p in worker.receiver.progress()] == [12])
        for version in (2, 3):
            now[0] += 10.0
            seed(trainer, version)
            worker.follow(version, endpoint)
            assert 1 in trainer.versions()
        now[0] += 30.0
        seed(trainer, 4)
        assert trainer.versions() == [3, 4]
        worker.follow(4, endpoint)
        await until(lambda: worker.versions == [4])
    await trainer.close()


async def test_a_parent_that_drops_an_old_version_is_not_blamed() -> None:
    child, parent = Worker("child"), WeightServer(host="127.0.0.1")
    async with working(child) as (trainer, endpoint):
        above = await parent.start()
        seed(parent, 1, 12)
        old = seed(trainer, 1, 18)
        child.follow(1, above, endpoint)
        await until(lambda: [p.num_ready for p in child.receiver.progress()] == [12])
        # The route arrives just after the child has noticed the end of its stream.
        child.heard = lambda report: child.follow(2, above)
        parent.drop("job", 1)
        seed(parent, 2)
        await until(lambda: [p.num_ready for p in child.receiver.progress()] == [18])
        fill(old, 18, NUM_CHUNKS)
        old.finish()
        await until(lambda: child.versions == [1, 2])
        await asyncio.sleep(1.5)
    assert {report.event for report in child.reports} == {"moved", "done"}
    await parent.close()


async def test_a_parent_that_ends_without_a_newer_version_is_reported() -> None:
    child, parent = Worker("child"), WeightServer(host="127.0.0.1")
    async with working(child) as (trainer, endpoint):
        above = await parent.start()
        seed(parent, 1, 5)
        seed(trainer, 1)
        child.follow(1, above, endpoint)
        await until(lambda: [p.num_ready for p in child.receiver.progress()] == [5])
        parent.drop("job", 1)
        await until(lambda: child.versions == [1])
        await until(lambda: ("failed", above) in [(r.event, r.endpoint) for r in child.reports])
    await parent.close()


async def test_many_children_share_a_cap_without_stalls() -> None:
    entries, total = plan([("a", "uint8", (16 << 10,))])
    header = SnapshotHeader("job", 1, 1, 0, -1, 1, total, 16 << 10, entries)
    server = WeightServer(host="127.0.0.1", bytes_per_s=200e3)
    staging = server.stage(header, key=KEY)
    staging.fill(0, bytes(total))
    staging.finish()
    reports: list[TransferReport] = []
    route = Route(PolicyVersion(version=1, step=1), (ChunkSource(await server.start()),), key=KEY)
    transfers = [
        Transfer(
            route,
            job_id="job",
            stage=lambda header: Staging(header, key=KEY),
            report=reports.append,
            stall_timeout_s=60,
        )
        for _ in range(16)
    ]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(transfer.run() for transfer in transfers))
    await server.close()
    # With the cap a chunk takes 1.3 s, which is just below the default limit for slow.
    assert {report.event for report in reports} <= {"moved", "slow", "done"}


async def test_a_version_is_fetched_again() -> None:
    worker = Worker("worker")
    async with working(worker) as (trainer, endpoint):
        seed(trainer, 1)
        worker.follow(1, endpoint)
        await until(lambda: worker.versions == [1])
        worker.receiver.refetch(1)
        await until(lambda: worker.versions == [1, 1])


async def test_another_publication_of_the_same_version_replaces_the_one_held() -> None:
    """A version number is reused if both the store and its backup were lost."""
    worker = Worker("worker")
    async with working(worker) as (trainer, endpoint):
        seed(trainer, 1)
        worker.follow(1, endpoint)
        await until(lambda: worker.versions == [1])
        trainer.drop("job", 1)
        staging = trainer.stage(replace(make_header(1), step=2), key=KEY)
        fill(staging, 0, NUM_CHUNKS)
        staging.finish()
        announced = PolicyVersion(version=1, step=2, incarnation=1)
        route = Route(announced, (ChunkSource(endpoint),), key=KEY)
        assert not worker.receiver.route(route)
        await until(lambda: worker.versions == [1, 1])
        assert worker.receiver.route(
            replace(route, version=replace(announced, digest=staging.root))
        )
        assert not worker.receiver.route(replace(route, version=replace(announced, digest="other")))


async def test_a_route_to_another_source_takes_effect_immediately() -> None:
    worker = Worker("worker")
    other = WeightServer(host="127.0.0.1")
    second = await other.start()
    async with working(worker) as (trainer, endpoint):
        seed(trainer, 1, 5)
        worker.follow(1, endpoint)
        await until(lambda: [p.num_ready for p in worker.receiver.progress()] == [5])
        seed(other, 1)
        worker.follow(1, second)
        await until(lambda: worker.versions == [1])
    await other.close()
    came = Counter[str]()
    for report in worker.reports:
        came[report.endpoint] += report.num_bytes
    assert came == {endpoint: 5 * CHUNK, second: make_header(1).num_bytes - 5 * CHUNK}


async def test_two_snapshots_alternate_in_the_same_memory() -> None:
    near, far = Worker("near"), Worker("far")
    gc.collect()
    gc.disable()
    try:
        async with working(near, far) as (trainer, endpoint):
            for version in range(1, 8):
                near.follow(version, endpoint, base=version - 1)
                far.follow(version, near.endpoint)
                seed(trainer, version)
                await until(lambda version=version: far.versions[-1:] == [version])
                assert far.server.versions() == [v for v in (version - 1, version) if v]
            for worker in (near, far):
                # A thread that has just copied may hold one for longer on a busy machine.
                assert 2 <= len(set(worker.memory)) <= 3 < len(worker.memory)
    finally:
        gc.enable()


async def test_both_directions_are_capped() -> None:
    loop = asyncio.get_running_loop()
    num_bytes = make_header(1).num_bytes
    worker = Worker("worker", bytes_per_s=4 * num_bytes)
    async with working(worker) as (trainer, endpoint):
        seed(trainer, 1)
        start_s = loop.time()
        worker.follow(1, endpoint)
        await until(lambda: worker.versions == [1])
        # A lower bound: on a busy machine bytes may arrive late, but never early.
        assert loop.time() - start_s > 0.2
    slow, worker = WeightServer(host="127.0.0.1", bytes_per_s=4 * num_bytes), Worker("worker")
    async with working(worker):
        seed(slow, 1)
        start_s = loop.time()
        worker.follow(1, await slow.start())
        await until(lambda: worker.versions == [1])
        assert loop.time() - start_s > 0.2
    await slow.close()
