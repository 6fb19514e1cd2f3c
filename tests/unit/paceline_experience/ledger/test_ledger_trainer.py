"""Take, commit, checkpoint, rewind: the side of the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.errors import FencedError, InvalidError, StateError
from paceline.v1 import experience_pb2 as pb
from paceline_experience.jobs.export import Exporter

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import BatchShare
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import Worlds


def names(share: BatchShare) -> set[tuple[str, int]]:
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    return {(s.group_id, s.index) for s in samples}


async def test_take_waits_until_the_batch_is_ready(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    waiting = [
        asyncio.create_task(ledger.take(incarnation=1, step=0, rank=r, world=2)) for r in range(2)
    ]
    while not (await ledger.live()).waiting:
        await asyncio.sleep(0.001)
    world.clock.advance(3)
    assert (await ledger.live()).waiting_s == 3
    await world.filled(ledger)
    one, two = await asyncio.gather(*waiting)
    assert one.batch_id == two.batch_id
    assert not names(one) & names(two)
    assert len(names(one) | names(two)) == one.total_sequences == 4
    assert one.total_tokens == 12
    assert one.stats.trainer_wait_s == 3


async def test_a_retry_gets_the_same_and_another_world_size_the_same_batch(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    first = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert await ledger.take(incarnation=1, step=0, rank=0, world=1) == first
    ledger = await world.opened()
    parts = [await ledger.take(incarnation=1, step=0, rank=r, world=3) for r in range(3)]
    assert {p.batch_id for p in parts} == {first.batch_id}
    assert sorted(x for p in parts for x in p.samples) == sorted(first.samples)


async def test_other_ranks_may_ask_before_the_first_has_committed(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=2)
    early = asyncio.create_task(ledger.take(incarnation=1, step=1, rank=1, world=2))
    await asyncio.sleep(0.02)
    assert not early.done()
    assert not (await ledger.live()).waiting
    await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
    first = await ledger.take(incarnation=1, step=1, rank=0, world=2)
    assert (await early).batch_id == first.batch_id
    with pytest.raises(StateError, match="ledger is at step 1"):
        await ledger.take(incarnation=1, step=3, rank=1, world=2)


async def test_advantages_are_over_the_whole_batch(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    by_reward = {s.reward: s.advantages[0] for s in samples}
    assert by_reward == pytest.approx({0.0: -0.7071058, 1.0: 0.7071058})


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("raising", "KeyError: 'baseline'"),
        ("leaving", "SystemExit: 3"),
        (
            "short",
            "TypeError: an answer of shape (3,); one number per episode (4) or per policy token "
            "(12) is needed",
        ),
        ("endless", "ValueError: finite numbers of 32 bits are due; it gave inf"),
    ],
)
async def test_a_job_whose_advantage_fails_ends(
    store: Store, worlds: Worlds, kind: str, says: str
) -> None:
    world = worlds(store, experience={"advantage": kind})
    ledger = await world.started()
    await world.filled(ledger)
    waits = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    while not world.hooks.ends:
        await asyncio.sleep(0.01)
        await ledger.sweep()
    assert world.hooks.ends == [("failed", f"experience.advantage: {kind}: {says}")]
    assert (await waits).stop == "cancelled"
    await world.clean(ledger)


async def test_commit_adds_a_metric_row_once(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    for _ in range(2):
        answer = await ledger.commit(
            incarnation=1, step=0, batch_id=share.batch_id, metrics={"loss": 0.5}
        )
        assert answer == (1, None)
    [(step, values)] = world.hooks.of("train")
    assert (step, values["loss"], values["reward_mean"], values["staleness_max"]) == (
        1,
        0.5,
        0.5,
        0,
    )
    assert values["tokens_generated"] == 24
    assert values["counts"]["trained"] == 4


async def test_commit_of_another_batch_or_step_is_refused(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    await ledger.take(incarnation=1, step=0, rank=0, world=1)
    with pytest.raises(StateError, match="not other"):
        await ledger.commit(incarnation=1, step=0, batch_id="other", metrics={})
    with pytest.raises(StateError, match="step 1"):
        await ledger.commit(incarnation=1, step=1, batch_id="x", metrics={})
    with pytest.raises(StateError, match="ledger is at step 0"):
        await ledger.take(incarnation=1, step=1, rank=0, world=1)
    with pytest.raises(InvalidError, match="rank 2"):
        await ledger.take(incarnation=1, step=0, rank=2, world=2)
    await world.clean(ledger)


async def test_older_incarnations_are_refused_everywhere(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    waiting = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    await asyncio.sleep(0.01)
    assert await ledger.grant_incarnation() == 2
    calls = [
        waiting,
        ledger.take(incarnation=1, step=0, rank=0, world=1),
        ledger.commit(incarnation=1, step=0, batch_id="b", metrics={}),
        ledger.commit_checkpoint(incarnation=1, step=0, path="p"),
        ledger.rewind(incarnation=1, step=0),
        ledger.publish_version(incarnation=1, step=0, parent=0, num_bytes=1),
        ledger.take(incarnation=3, step=0, rank=0, world=1),
    ]
    for call in calls:
        with pytest.raises(FencedError):
            await call


async def test_stale_groups_are_dropped_when_a_batch_is_taken(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger, version=0)
    await world.trained(ledger, 0)
    await world.filled(ledger, version=0)  # used from step 2 on: too old for S = 1
    await world.trained(ledger, 1)
    await world.filled(ledger, version=2)
    share = await ledger.take(incarnation=1, step=2, rank=0, world=1)
    assert share.stats.staleness_max == 0
    assert (await world.clean(ledger))["stale"] == 4


async def test_older_groups_go_first(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience={"max_staleness": 5})
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=12, evals=0)
    await ledger.submit(world.whole(leased[:2]))
    await world.trained(ledger, 0)
    await ledger.submit(world.whole(leased[2:4], version=1))
    await ledger.submit(world.whole(leased[4:6], version=0))
    share = await ledger.take(incarnation=1, step=1, rank=0, world=1)
    assert {g for g, _ in names(share)} == {a.group_id for a in leased[4:6]}
    assert share.stats.staleness_max == 1


async def test_rewind_hands_out_the_same_batches(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience={"max_staleness": 5})
    ledger = await world.started()
    await world.filled(ledger)
    before = [await world.trained(ledger, step) for step in range(3)]
    await ledger.commit_checkpoint(incarnation=1, step=1, path="c1")
    incarnation = await ledger.grant_incarnation()
    assert await ledger.rewind(incarnation=incarnation, step=1) == (1, 3)
    made = await ledger.publish_version(incarnation=incarnation, step=1, parent=1, num_bytes=1)
    assert (made.version, made.step) == (4, 1)
    for step in (1, 2):
        share = await world.trained(ledger, step, incarnation=incarnation)
        assert share == before[step]
    counts = await world.clean(ledger)
    assert (counts["durable"], counts["trained"], counts["ready"]) == (4, 8, 12)
    assert sum((await ledger.live()).staleness_histogram.values()) == 12


async def test_age_counts_at_most_from_the_rewound_step(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience={"max_staleness": 2})
    ledger = await world.started()
    await world.filled(ledger)
    for step in range(2):
        await world.trained(ledger, step)
    await world.filled(ledger, version=2)
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=0)
    ages: list[int] = []
    for step in range(4):
        share = await world.trained(ledger, step, incarnation=incarnation)
        ages.append(share.stats.staleness_max)
        if step == 2:
            await world.filled(ledger, version=5)
        assert step - min(share.age_steps.values()) == ages[-1]
    assert ages == [0, 1, 2, 0]
    assert (await world.clean(ledger))["stale"] == 8  # version 2 counts from step 0


async def test_rewind_below_what_is_durable_is_refused(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    await world.trained(ledger, 0)
    await ledger.commit_checkpoint(incarnation=1, step=1, path="c")
    for step in (0, 2):
        with pytest.raises(StateError, match="keeps steps 1 to 1"):
            await ledger.rewind(incarnation=1, step=step)
    with pytest.raises(StateError, match="ledger is at step 1"):
        await ledger.commit_checkpoint(incarnation=1, step=2, path="c")


async def test_checkpoints_free_payloads_but_the_newest(
    store: Store, worlds: Worlds, tmp_path: Path
) -> None:
    world = worlds(store, experience={"keep_trajectories": 3})
    ledger = await world.started()
    await world.filled(ledger)
    for step in range(2):
        await world.trained(ledger, step)
    await ledger.commit_checkpoint(incarnation=1, step=2, path="c")
    assert await store.command("HLEN", "{default/j1}:payloads") == 8  # until they are exported
    assert await Exporter(tmp_path).export(ledger, name="step-2") == 8
    await ledger.trim()
    assert await store.command("HLEN", "{default/j1}:payloads") == 3
    size = (await ledger.live()).payload_bytes
    page, token = await ledger.trajectories.page(purpose="train", page_size=2, page_token="")
    rest, end = await ledger.trajectories.page(purpose="train", page_size=2, page_token=token)
    with pytest.raises(InvalidError, match="page_token: 'x' was not given by this service"):
        await ledger.trajectories.page(purpose="train", page_size=2, page_token="x")
    assert ([t.episode_id for t in page + rest], end) == (["j1.3/1", "j1.3/0", "j1.2/1"], "")
    reopened = await world.opened()
    assert (await reopened.live()).payload_bytes == size
    await world.clean(reopened)


async def test_payloads_that_are_not_exported_do_not_fill_the_ledger(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience={"keep_trajectories": 3, "payload_bytes": 1600})
    ledger = await world.started()
    for step in range(2):
        await world.filled(ledger, version=step)
        await world.trained(ledger, step)
    assert (await ledger.live()).payload_bytes > 800
    await ledger.commit_checkpoint(incarnation=1, step=2, path="c")
    assert await store.command("ZCARD", "{default/j1}:ring") == 3
    assert ledger.trajectories.exported.num_missing == 5


async def test_what_goes_while_an_export_is_written_is_missing_only_if_it_is_in_no_file(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience={"keep_trajectories": 3, "payload_bytes": 1600})
    ledger = await world.started()
    listing = ledger.trajectories
    for step in range(2):
        await world.filled(ledger, version=step)
        await world.trained(ledger, step)
    begun = await listing.begin("a", before_step=1)
    assert begun is not None
    await ledger.commit_checkpoint(incarnation=1, step=2, path="c")
    assert listing.exported.num_missing == 1  # of the second step
    again = await listing.begin("b", before_step=None)  # the first file never came
    assert again is not None
    assert listing.exported.num_missing == 5
    await listing.end(again, num_written=3)
    assert listing.exported.num_missing == 5


async def test_zero_variance_groups_are_refilled(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    woken = ledger.wakeup()
    await ledger.submit([world.made(leased[0], i, reward=1.0) for i in range(2)])
    assert woken.is_set()
    [more] = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    assert more.group_id == "j1.4"
    assert (await world.clean(ledger))["filtered"] == 2


async def test_payload_budget_blocks_admission_and_fails_a_stuck_job(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience={"payload_bytes": 100, "batch_groups": 4})
    ledger = await world.started()
    first = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    await ledger.submit(world.whole(first))
    assert (await ledger.live()).headroom_groups == 0
    assert await ledger.leases.lease(worker_id="w", train=4, evals=0) == []
    trainer = await world.waiting(ledger, 0)
    await ledger.sweep()
    assert (await trainer).stop == "cancelled"
    assert [state for state, _ in world.hooks.ends] == ["failed"]
    assert "experience.payload_bytes" in world.hooks.ends[0][1]


async def test_a_repeated_announcement_keeps_its_number(store: Store, worlds: Worlds) -> None:
    ledger = await worlds(store).started()
    again = await ledger.publish_version(incarnation=1, step=0, parent=-1, num_bytes=10)
    assert again.version == 0
    other = await ledger.publish_version(incarnation=1, step=0, parent=0, num_bytes=10)
    assert other.version == 1


async def test_payloads_without_an_owner_go_at_the_next_start(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    size = (await ledger.live()).payload_bytes
    await store.command("HSET", "{default/j1}:payloads", "j1.9/0/1", b"orphan")
    ledger = await world.opened()
    assert (await ledger.live()).payload_bytes == size
    assert await store.command("HLEN", "{default/j1}:payloads") == 8


async def test_audit_names_what_is_wrong(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    await store.command("HINCRBY", "{default/j1}:counts", "ready", 1)
    await store.command("HDEL", "{default/j1}:payloads", "j1.0/1/1")
    report = await ledger.verify()
    assert not report.ok
    assert "ready: counted 9, found 8" in report.problems
    assert "payload j1.0/1/1 is gone" in report.problems
