"""Replay: stored episodes join later groups as guests, and are trained once per batch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from paceline.data import JobData
from paceline.errors import InvalidError
from paceline.v1 import experience_pb2 as pb
from paceline_experience.ledger.sources import try_plugins
from paceline_experience.store.keys import JobKeys

if TYPE_CHECKING:
    from paceline.types import Assignment
    from paceline_experience.ledger.ledger import BatchShare, JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

DART: dict[str, Any] = {
    "batch_groups": 1,
    "group_size": 8,
    "max_staleness": 0,
    "keep_trajectories": 1,
    "replay": {"kind": "dart_pool"},
}


async def played(world: World, ledger: JobLedger, *rewards: float, version: int) -> Assignment:
    """Lease one group and finish its episodes with these rewards."""
    (leased,) = await ledger.leases.lease(worker_id="w", train=len(rewards), evals=0)
    done = [world.made(leased, n, reward=r, version=version) for n, r in enumerate(rewards)]
    await ledger.submit(done)
    return leased


async def exported(ledger: JobLedger) -> None:
    """Write all trained trajectories to a file, and delete those that are not to be kept."""
    found = await ledger.trajectories.begin("f", before_step=None)
    assert found is not None
    await ledger.trajectories.end(found, num_written=found.count)
    await ledger.trim()


def samples_of(share: BatchShare) -> dict[int, pb.TrainSample]:
    found = [pb.TrainSample.FromString(data) for data in share.samples]
    assert len({sample.group_id for sample in found}) == 1
    return {sample.index: sample for sample in found}


async def test_a_group_without_success_gets_a_stored_one_in_place_of_its_first_failure(
    store: Store, worlds: Worlds
) -> None:
    """[0] * 8 with one stored success: seven 0 and one 1, with a mean of 1 / 8, and kept."""
    world = worlds(store, experience=DART, num_tasks=1)
    ledger = await world.started()
    first = await played(world, ledger, *[0.0] * 5, 1.0, 0.0, 0.0, version=0)
    await world.trained(ledger, 0)
    await ledger.commit_checkpoint(incarnation=1, step=1, path="p")
    await exported(ledger)
    kept = f"{first.group_id}/5/1"
    # Of what was trained one is listed; the success is needed by the pool.
    assert await world.payloads() == {kept, f"{first.group_id}/7/1"}
    second = await played(world, ledger, *[0.0] * 8, version=1)
    live = await ledger.live()
    assert (live.ready_groups, live.dropped) == (1, {"replaced": 1})
    ledger = await world.opened()  # experience restarts between offer and batch
    share = await ledger.take(incarnation=1, step=1, rank=0, world=1)
    found = samples_of(share)
    assert {index: each.reward for index, each in found.items()} == {
        **dict.fromkeys(range(1, 8), 0.0),
        8: 1.0,
    }
    guest = found[8]
    assert guest.group_id == second.group_id
    assert [(run.version, run.count) for run in guest.versions] == [(0, 3)]
    assert list(guest.logprobs) == [-0.5] * 3
    assert guest.advantages[0] == pytest.approx((7 / 8) / (1 / 8) ** 0.5, rel=1e-3)
    assert share.age_steps == {0: 0, 1: 1}
    stats = share.stats
    assert (stats.replayed, stats.replayed_age_mean) == (1, 1.0)
    assert (stats.reward_mean, stats.staleness_max, stats.batch_episodes) == (0.0, 0, 7)
    assert stats.zero_variance_share == 0.0
    await ledger.commit(incarnation=1, step=1, batch_id=share.batch_id, metrics={})
    counts = await world.clean(ledger)
    assert (counts["admitted"], counts["trained"], counts["durable"]) == (16, 7, 8)
    assert (counts["replaced"], counts["replayed"]) == (1, 1)
    ((_, values),) = [row for row in world.hooks.of("train") if row[0] == 2]
    assert values["replayed"] == 1


async def test_without_a_stored_success_the_group_is_dropped(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience=DART, num_tasks=2)
    ledger = await world.started()
    await played(world, ledger, *[0.0] * 8, version=0)
    await played(world, ledger, *[1.0] * 8, version=0)
    live = await ledger.live()
    assert (live.dropped, live.filtered) == ({"filtered": 16}, {"zero_variance": 2})
    # A group that is dropped has stored its successes all the same.
    assert len(await world.payloads()) == 8
    await world.clean(ledger)


async def test_a_rewind_trains_the_same_batch_with_its_guests(store: Store, worlds: Worlds) -> None:
    """The pool has long evicted the guest, which the batch pins until it is durable."""
    few = {**DART, "replay": {"kind": "dart_pool", "per_task": 1}}
    world = worlds(store, experience=few, num_tasks=1)
    ledger = await world.started()
    first = await played(world, ledger, *[0.0] * 7, 1.0, version=0)
    await world.trained(ledger, 0)
    await ledger.commit_checkpoint(incarnation=1, step=1, path="p")
    await exported(ledger)
    await played(world, ledger, *[0.0] * 8, version=1)
    before = await world.trained(ledger, 1)
    await played(world, ledger, *[0.0] * 7, 1.0, version=2)
    await world.trained(ledger, 2)
    kept = f"{first.group_id}/7/1"
    assert kept in await world.payloads()
    ledger = await world.opened()
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=1)
    after = await ledger.take(incarnation=incarnation, step=1, rank=0, world=1)
    assert after.batch_id == before.batch_id
    assert after.samples == before.samples
    await ledger.commit(incarnation=incarnation, step=1, batch_id=after.batch_id, metrics={})
    assert (await world.clean(ledger))["replayed"] == 1
    await ledger.commit_checkpoint(incarnation=incarnation, step=2, path="p")
    assert kept not in await world.payloads()
    assert (await world.clean(ledger))["replayed"] == 1


async def test_plain_replay_mixes_the_newest_into_every_group(store: Store, worlds: Worlds) -> None:
    """A quarter of 6 + 2; nothing older than two steps, and nothing without a reward."""
    plain = {"kind": "experience_replay", "share": 0.25, "max_age": 2, "at_least": 0.5}
    experience = {**DART, "group_size": 6, "replay": plain, "filters": []}
    world = worlds(store, experience=experience, num_tasks=1)
    ledger = await world.started()
    counts: list[int] = []
    for step, successes in enumerate((3, 1, 0, 0, 0, 0)):
        rewards = [1.0] * successes + [0.0] * (6 - successes)
        await played(world, ledger, *rewards, version=step)
        share = await world.trained(ledger, step)
        counts.append(share.stats.replayed)
        assert share.stats.batch_episodes == 6
    # Of step 0 there are 3, of step 1 there is 1; the newest two are taken.
    assert counts == [0, 2, 2, 1, 0, 0]
    assert (await world.clean(ledger))["replayed"] == 5


async def test_filters_see_guests_last_and_may_leave_them_out(store: Store, worlds: Worlds) -> None:
    """`balanced` trims eight to two; a group of which only guests are kept is dropped."""
    for filters, expected in (
        ([{"kind": "balanced", "keep": 2}], {1, 8}),
        ([{"kind": "these", "indices": [0, 1]}], {1, 2}),
        ([{"kind": "these", "indices": [7]}], None),
    ):
        await store.redis.flushall()
        world = worlds(store, experience={**DART, "filters": filters}, num_tasks=1)
        ledger = await world.started()
        await played(world, ledger, *[0.0] * 7, 1.0, version=0)
        await world.trained(ledger, 0)
        await played(world, ledger, *[0.0] * 8, version=1)
        live = await ledger.live()
        if expected is None:
            assert live.filtered == {"only replayed": 1}
        else:
            share = await ledger.take(incarnation=1, step=1, rank=0, world=1)
            assert {*samples_of(share)} == expected
        await world.clean(ledger)


async def test_another_environment_offers_no_old_success(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience=DART, num_tasks=1)
    ledger = await world.started()
    await played(world, ledger, *[0.0] * 7, 1.0, version=0)
    await world.trained(ledger, 0)
    tasks = world.spec.tasks.model_copy(update={"options": {"digits": 2}})
    world.spec = world.spec.model_copy(update={"tasks": tasks})
    ledger = await world.opened()
    await played(world, ledger, *[0.0] * 8, version=1)
    assert (await ledger.live()).dropped == {"filtered": 8}
    await world.clean(ledger)


async def test_the_pool_is_bounded_and_goes_with_the_job(store: Store, worlds: Worlds) -> None:
    """Bytes are those of payloads and 512 for each record."""
    pool = {"kind": "dart_pool", "per_task": 2, "pool_bytes": 2000}
    experience = {**DART, "batch_groups": 3, "max_staleness": 5, "replay": pool}
    world = worlds(store, experience=experience, num_tasks=100)
    ledger = await world.started()
    key = JobKeys("default", "j1").replay
    for _ in range(3):
        await played(world, ledger, *[1.0] * 8, version=0)
        assert await store.command("HLEN", key) <= 3
        await world.clean(ledger)
    kept = await store.command("HKEYS", key)
    assert sorted(kept) == [b"1/7", b"2/6", b"2/7"]
    await ledger.completion.cancel()
    assert await store.command("HLEN", key) == 0
    assert not await world.payloads()
    await world.clean(ledger)


async def test_jobs_without_replay_store_nothing_for_it(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    await world.trained(ledger, 0)
    keys = JobKeys("default", "j1")
    assert not await store.command("EXISTS", keys.replay)
    texts = await store.command("HVALS", keys.groups)
    assert not any(b"guests" in text for text in texts)
    counts = await store.command("HKEYS", keys.counts)
    assert not any(b"replay" in name for name in counts)


@pytest.mark.parametrize(
    ("replay", "says"),
    [
        ({"kind": "dart_pool", "sucess": 1}, "experience.replay.sucess: unknown option"),
        ({"kind": "experience_replay", "share": 1.5}, "experience.replay.share"),
        ({"kind": "any_replay", "deed": "keep"}, "experience.replay: any_replay.*ZeroDivision"),
        ({"kind": "any_replay", "deed": "number"}, "a guest of type int; Guest is needed"),
        ({"kind": "any_replay", "deed": "crowd"}, "places .0, 0. of 1; each once"),
    ],
)
async def test_one_that_errs_is_refused(
    store: Store, worlds: Worlds, replay: dict[str, Any], says: str
) -> None:
    world = worlds(store, experience={"replay": replay})
    with pytest.raises(InvalidError, match=says):
        await asyncio.to_thread(try_plugins, world.spec, JobData())


async def test_one_that_errs_later_fails_its_job(store: Store, worlds: Worlds) -> None:
    wrong = {**DART, "replay": {"kind": "any_replay", "deed": "keep"}}
    world = worlds(store, experience=wrong)
    ledger = await world.started()
    for _ in range(2):
        await played(world, ledger, *[0.0] * 8, version=0)
        await ledger.sweep()
    ((state, reason),) = set(world.hooks.ends)
    assert state == "failed"
    assert "experience.replay: any_replay: ZeroDivisionError" in reason
