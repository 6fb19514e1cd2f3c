import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import WorkerKind
from paceline.types import PolicyVersion, WeightRefusal, Worker
from paceline.weights.route import (
    ChunkSource,
    Route,
    TransferEvent,
    TransferProgress,
    TransferReport,
)
from paceline_experience.fleet.roster import Roster
from paceline_experience.fleet.routes import RoutePlanner, SeededVersion, held_workers
from paceline_experience.store.signal import Signal
from paceline_harness.patience import PATIENCE_S

SEED, SECOND = "http://node0", "http://node1"
KEY = bytes(range(32))


def rollout(number: int, *, active: int = -1) -> Worker:
    return Worker(
        worker_id=f"w{number:02}",
        kind=WorkerKind.ROLLOUT,
        endpoint=f"h:{number}",
        job_id="j",
        active_version=active,
        weights_endpoint=f"http://w{number:02}",
    )


def trainer(*, at: str = SEED) -> Worker:
    return Worker(
        worker_id="t",
        kind=WorkerKind.TRAINER,
        endpoint="h:t",
        site="far",
        job_id="j",
        weights_endpoint=at,
    )


def has(*versions: int, ready: int = 4) -> list[TransferProgress]:
    return [TransferProgress(version, ready, 4) for version in versions]


def parent_of(route: Route) -> str:
    (source,) = route.sources
    return source.endpoint


async def soon(routes: AsyncIterator[Route]) -> Route:
    return await asyncio.wait_for(anext(routes), PATIENCE_S)


class Job:
    """A job's workers and what they are told."""

    def __init__(self, *, debounce_s: float = 0.0) -> None:
        self.now = 0.0
        self.roster = Roster(lease_s=6.0, clock=lambda: self.now)
        self.tracker = RoutePlanner(self.roster, clock=lambda: self.now, debounce_s=debounce_s)

    def join(self, *workers: Worker) -> None:
        for worker in workers:
            self.roster.join(worker)
        self.tracker.sync()

    def leave(self, name: str) -> None:
        self.roster.leave(name)
        self.tracker.sync()

    def beat(self, name: str, transfers: list[TransferProgress], *, active: int = -1) -> None:
        self.only_beat(name, transfers, active=active)
        self.tracker.sync()

    def only_beat(self, name: str, transfers: list[TransferProgress], *, active: int = -1) -> None:
        member = self.roster.beat(name, active_version=active, transfers=transfers)
        self.tracker.progress(member)

    def announce(
        self,
        number: int,
        *,
        seeds: tuple[ChunkSource, ...] = (ChunkSource(SEED),),
        held: int = -1,
        digest: str = "",
    ) -> None:
        version = PolicyVersion(number, number, digest=digest, num_bytes=4 << 20)
        made = SeededVersion(version, 1 << 20, seeds)
        self.tracker.announce("j", made, key=KEY, held=held)

    def say(self, number: int, event: TransferEvent, sender: str, *, version: int = 0) -> None:
        self.tracker.report("j", TransferReport(f"w{number:02}", version, sender, event))

    def route(self, number: int) -> Route:
        route = self.tracker.route("j", f"w{number:02}")
        assert route is not None
        return route

    def version(self, number: int) -> int:
        return self.route(number).version.version


@pytest.fixture
def job() -> Job:
    return Job()


def test_nobody_is_routed_to_a_withdrawn_version(job: Job) -> None:
    job.join(rollout(1))
    job.announce(0)
    job.announce(1)
    assert job.version(1) == 1
    job.tracker.withdraw("j", 1)
    job.join(rollout(2))
    assert (job.version(1), job.version(2)) == (0, 0)
    job.tracker.withdraw("j", 1)  # again
    job.announce(1, digest="d")  # rank 0 has its digest only now
    assert (job.version(1), job.version(2)) == (0, 0)
    job.announce(2)
    assert (job.version(1), job.version(2)) == (2, 2)


def test_the_first_version_may_be_withdrawn(job: Job) -> None:
    job.join(rollout(1))
    job.announce(0)
    job.tracker.withdraw("j", 0)
    assert job.tracker.route("j", "w01") is None
    job.announce(1)
    assert job.version(1) == 1


def test_a_refusal_is_shown_as_the_trouble_of_its_worker(job: Job) -> None:
    job.join(rollout(1), rollout(2))
    job.announce(0)
    job.roster.beat("w01", refusal=WeightRefusal(0, "canary: trim 1"))
    shown = {each.worker_id: each.trouble for each in job.tracker.placement("j").holders}
    assert shown == {"": "", "w01": "refuses version 0: canary: trim 1", "w02": ""}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(-1, 3)), unique_by=lambda w: w[0]))
def test_a_quarter_stays_for_an_eval(told: list[tuple[int, int]]) -> None:
    workers = [rollout(number, active=active) for number, active in told]
    behind = sorted(w.worker_id for w in workers if w.active_version <= 1)
    assert sorted(held_workers(workers, 1)) == behind[: max(1, len(workers) // 4)]


async def test_a_watcher_waits_for_the_first_version_and_for_its_own_join(job: Job) -> None:
    waiting = asyncio.create_task(soon(job.tracker.watch("j", "w01")))
    await asyncio.sleep(0)
    job.announce(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    job.join(rollout(1))
    route = await waiting
    assert (parent_of(route), route.key) == (SEED, KEY)


async def test_each_version_is_announced_once(job: Job) -> None:
    job.join(rollout(1))
    job.announce(0)
    routes = job.tracker.watch("j", "w01")
    assert (await soon(routes)).version.version == 0
    job.beat("w01", has(0), active=0)
    job.announce(0)
    job.join(rollout(2))
    job.announce(1)
    assert (await soon(routes)).version.version == 1


async def test_a_dead_parent_is_replaced(job: Job) -> None:
    job.join(*map(rollout, (1, 2, 3)))
    job.announce(0)
    routes = job.tracker.watch("j", "w03")
    assert parent_of(await soon(routes)) == "http://w02"
    job.leave("w02")
    assert parent_of(await soon(routes)) == "http://w01"


async def test_a_report_moves_its_sender(job: Job) -> None:
    job.join(*map(rollout, (1, 2, 3)))
    job.announce(0)
    routes = job.tracker.watch("j", "w03")
    await soon(routes)
    job.say(3, TransferEvent.MOVED, "http://w02")
    following = asyncio.create_task(soon(routes))
    await asyncio.sleep(0)
    assert not following.done()
    job.say(3, TransferEvent.STALLED, "http://w02")
    assert parent_of(await following) == "http://w01"


async def test_a_late_joiner_is_served_by_a_peer(job: Job) -> None:
    job.join(rollout(1))
    job.announce(0)
    job.beat("w01", has(0), active=0)
    job.join(rollout(2))
    assert parent_of(job.route(2)) == "http://w01"
    assert SEED in job.route(2).fallbacks


async def test_a_restarted_trainer_is_found(job: Job) -> None:
    job.join(rollout(1))
    job.announce(0)
    routes = job.tracker.watch("j", "w01")
    assert parent_of(await soon(routes)) == SEED
    job.announce(1, seeds=(ChunkSource("http://other"),))
    assert parent_of(await soon(routes)) == "http://other"


async def test_changes_in_quick_succession_are_sent_as_one() -> None:
    """On a machine that takes long for the changes it may be more than once, but no sooner."""
    job = Job(debounce_s=0.2)
    job.join(rollout(1))
    told: list[tuple[int, float]] = []
    now = asyncio.get_running_loop().time

    async def watch() -> None:
        async for route in job.tracker.watch("j", "w01"):
            told.append((route.version.version, now()))

    watching = asyncio.create_task(watch())
    for version in range(5):
        job.announce(version)
        for _ in range(3):
            await asyncio.sleep(0)
    assert told[0][0] == 0
    async with asyncio.timeout(PATIENCE_S):
        while told[-1][0] < 4:
            await asyncio.sleep(0.01)
    assert min_gap_s([at for _, at in told]) > 0.19
    watching.cancel()


async def test_changes_in_waves() -> None:
    signal = Signal()
    times: list[float] = []
    now = asyncio.get_running_loop().time

    async def count() -> None:
        async for _ in signal.debounced(0.1):
            times.append(now())

    counting = asyncio.create_task(count())
    for _ in range(20):
        await asyncio.sleep(0)
        signal.fire()
    last = now()
    async with asyncio.timeout(PATIENCE_S):
        while times[-1] < last:
            await asyncio.sleep(0.01)
    known = len(times)
    await asyncio.sleep(0.3)
    assert len(times) == known
    assert min_gap_s(times) > 0.09
    counting.cancel()


def min_gap_s(times: list[float]) -> float:
    """The shortest time between two that follow each other."""
    return min(after - before for before, after in pairwise(times))


async def test_a_lagging_worker_moves_all_affected_workers(job: Job) -> None:
    """Its beats alone change routes; the watchers of the others hear of it."""
    job.join(*map(rollout, (1, 2, 3)))
    job.announce(0)
    routes = job.tracker.watch("j", "w03")
    assert parent_of(await soon(routes)) == "http://w02"
    following = asyncio.create_task(soon(routes))
    for second in range(1, 12):
        job.now += 1.0
        job.only_beat("w01", [TransferProgress(0, 40 * second, 1000, (SEED,))])
        job.only_beat("w02", [TransferProgress(0, second, 1000, ("http://w01",))])
    assert parent_of(await following) == "http://w01"


async def test_a_digest_alone_changes_no_route(job: Job) -> None:
    job.join(*map(rollout, (1, 2, 3)))
    seeds = (ChunkSource(SEED), ChunkSource(SECOND, 1, 2))
    job.announce(0, seeds=seeds)
    assert SECOND in {source.endpoint for source in job.route(1).sources}
    for number in (2, 3):
        job.say(number, TransferEvent.FAILED, SECOND)
    alone = job.route(1)
    assert SECOND not in {source.endpoint for source in alone.sources}
    job.announce(0, seeds=seeds, digest="d")
    assert job.route(1) is alone
    assert job.tracker.placement("j").versions[0].version.digest == "d"


async def test_partial_seeds_are_used_in_parallel(job: Job) -> None:
    job.join(rollout(1))
    job.announce(0)
    routes = job.tracker.watch("j", "w01")
    assert (await soon(routes)).sources == (ChunkSource(SEED),)
    job.announce(0, seeds=(ChunkSource(SEED), ChunkSource(SECOND, 1, 2)))
    assert (await soon(routes)).sources == (ChunkSource(SEED, 0, 2), ChunkSource(SECOND, 1, 2))


def test_a_part_moves_with_its_seed() -> None:
    made = SeededVersion(PolicyVersion(0, 0), 1, (ChunkSource(SEED),))
    both = made.with_seed(ChunkSource(SECOND, 1, 2))
    assert both.seeds == (ChunkSource(SEED), ChunkSource(SECOND, 1, 2))
    assert both.with_seed(ChunkSource("http://new", 1, 2)).seeds[1].endpoint == "http://new"
    assert both.source == SEED


def test_an_eval_holds_a_quarter_of_the_workers(job: Job) -> None:
    job.join(*map(rollout, range(4)))
    job.announce(0, held=0)
    assert [job.version(number) for number in range(4)] == [0, 0, 0, 0]
    job.announce(1, held=0)
    assert [job.version(number) for number in range(4)] == [0, 1, 1, 1]
    assert parent_of(job.route(1)) == SEED
    job.tracker.hold("j", -1)
    assert [job.version(number) for number in range(4)] == [1, 1, 1, 1]


def test_a_late_worker_is_held_when_the_one_that_was_dies(job: Job) -> None:
    job.join(trainer())
    for number in range(4):
        job.announce(number, held=0)
    job.beat("t", has(0, 2, 3))
    job.join(rollout(1))
    assert job.version(1) == 0
    assert job.tracker.placement("j").versions[-1].version.version == 0


def test_after_a_restart_of_the_service_the_held_stay(job: Job) -> None:
    job.announce(5, held=3)
    job.join(rollout(1), rollout(2, active=3), rollout(3, active=3))
    assert job.tracker.route("j", "w02") is None
    assert [job.version(number) for number in (1, 3)] == [5, 5]
    job.tracker.hold("j", -1)
    assert job.version(2) == 5


def test_a_query_about_chunks_does_not_register_a_job(job: Job) -> None:
    job.join(rollout(1))
    assert job.tracker.chunk_bytes("j", 64 << 20) >= 256 << 10
    assert not job.tracker.placement("j").holders


def test_no_worker_is_kept_at_a_version_that_is_gone(job: Job) -> None:
    job.join(rollout(1), trainer())
    for version in range(3):
        job.announce(version, held=1)
    job.beat("t", has(1, 2))
    assert job.version(1) == 1
    job.beat("t", has(2))
    assert job.version(1) == 2


def test_few_versions_are_kept(job: Job) -> None:
    job.join(rollout(1))
    for version in range(20):
        job.announce(version)
        job.beat("w01", has(version), active=version)
    assert len(job.tracker.placement("j").versions) <= 3


def test_workers_of_other_jobs_are_no_peers(job: Job) -> None:
    job.join(replace(rollout(1), job_id="k"), rollout(2))
    job.announce(0)
    assert parent_of(job.route(2)) == SEED
    assert job.tracker.route("j", "w01") is None
    job.tracker.forget("j")
    assert job.tracker.route("j", "w02") is None


async def test_a_watcher_of_a_job_that_is_over_keeps_nothing_of_it(job: Job) -> None:
    job.join(rollout(1))
    job.announce(0)
    routes = job.tracker.watch("j", "w01")
    await soon(routes)
    following = asyncio.create_task(soon(routes))
    await asyncio.sleep(0)
    job.tracker.forget("j")
    await asyncio.sleep(0)
    assert not following.done()
    assert job.tracker.newest("j") is None
    following.cancel()


def test_which_workers_hold_which_versions(job: Job) -> None:
    job.join(rollout(1), rollout(2), trainer())
    job.announce(3)
    job.beat("t", has(2, 3), active=3)
    job.beat("w01", has(3, ready=1), active=2)
    seed, first, second = job.tracker.placement("j").holders
    assert (seed.worker_id, seed.endpoint, seed.active_version) == ("", SEED, 3)
    assert seed.transfers == tuple(has(2, 3))
    assert (first.worker_id, first.active_version) == ("w01", 2)
    assert first.transfers == tuple(has(3, ready=1))
    assert second.sources == (ChunkSource("http://w01"),)
    assert job.tracker.site(SEED) == "far"
    assert job.tracker.site("http://nobody") == ""
