"""Filters drop groups, keep a part of them, or fail."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import parse_job
from paceline.plugins import FinishedGroup
from paceline.types import Score
from paceline.v1 import experience_pb2 as pb
from paceline_experience.ledger.filters.chain import FilterChain
from paceline_experience.store.keys import JobKeys

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import BatchShare
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

G = 4
KEYS = JobKeys("default", "j1")


def make(worlds: Worlds, store: Store, *filters: Any, **experience: Any) -> World:
    return worlds(store, experience={"filters": list(filters), **experience})


def keeping(worlds: Worlds, store: Store, *indices: list[int], **experience: Any) -> World:
    """A job with groups of four, of which filters keep these, one after another."""
    filters = [{"kind": "these", "indices": each} for each in indices]
    return make(worlds, store, *filters, group_size=G, advantage="dr_grpo", **experience)


def samples(share: BatchShare) -> list[pb.TrainSample]:
    return [pb.TrainSample.FromString(data) for data in share.samples]


def trained(share: BatchShare) -> set[tuple[str, int]]:
    return {(each.group_id, each.index) for each in samples(share)}


async def payloads(store: Store) -> set[str]:
    names: list[bytes] = await store.command("HKEYS", KEYS.payloads)
    return {name.decode() for name in names}


async def test_a_group_on_which_a_filter_fails_is_dropped_and_others_are_not(
    store: Store, worlds: Worlds
) -> None:
    world = make(worlds, store, "choosy")
    ledger = await world.started()
    first, second, *_ = leased = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    good = [world.made(first, place, reward=1.0) for place in range(2)]
    bad = [world.made(second, place, reward=0.0) for place in range(2)]
    assert await ledger.submit([*good, *bad]) == ["accepted"] * 4
    assert await ledger.submit(bad) == ["dropped"] * 2
    counts = await world.clean(ledger)
    assert (counts["ready"], counts["leased"], counts["invalid"]) == (2, 4, 2)
    await ledger.submit(world.whole(leased[2:]))
    await ledger.sweep()
    assert world.hooks.ends == []


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("dividing", {}, "ZeroDivisionError: integer division or modulo by zero"),
        ("leaving", {}, "SystemExit: 3"),
        ("answering", {}, "TypeError: an answer of type str; Keep, Drop or Repair is due"),
        ("answering", {"mask": True}, "TypeError: indices of episodes are due, not a mask; it"),
        ("answering", {"indices": []}, "ValueError: indices [] of 2 episodes; at least one is due"),
        ("answering", {"indices": [1, 0]}, "ValueError: indices [1, 0] of 2 episodes; at least"),
        ("answering", {"indices": [0, 2]}, "ValueError: indices [0, 2] of 2 episodes; at least"),
    ],
)
async def test_a_job_whose_filter_fails_on_every_group_ends(
    store: Store, worlds: Worlds, kind: str, options: dict[str, Any], says: str
) -> None:
    world = make(worlds, store, {"kind": kind, **options})
    ledger = await world.started()
    await world.filled(ledger)
    await ledger.sweep()
    ((state, reason),) = world.hooks.ends
    assert state == "failed"
    assert reason.startswith(f"experience.filters.0: {kind}: {says}")
    counts = await world.clean(ledger)
    assert counts["invalid"] == counts["dropped"] == counts["admitted"]
    assert await payloads(store) == set()


async def test_episodes_that_are_left_out_are_dropped_and_the_batch_is_made_of_the_others(
    store: Store, worlds: Worlds
) -> None:
    world = keeping(worlds, store, [0, 1, 3])
    ledger = await world.started()
    leased = await world.filled(ledger)
    counts = await world.clean(ledger)
    groups = len(leased)
    assert (counts["ready"], counts["dropped"], counts["filtered"]) == (
        3 * groups,
        groups,
        groups,
    )
    assert await payloads(store) == {f"{a.group_id}/{i}/1" for a in leased for i in (0, 1, 3)}
    share = await world.trained(ledger, 0)
    assert trained(share) == {(a.group_id, i) for a in leased[:2] for i in (0, 1, 3)}
    for sample in samples(share):  # rewards 0, 1, 1 of each group
        assert sample.advantages == pytest.approx([sample.reward - 2 / 3])
    stats = share.stats
    assert (stats.batch_episodes, stats.batch_groups, stats.batch_tokens) == (6, 2, 18)
    assert (stats.reward_mean, stats.zero_variance_share) == (pytest.approx(2 / 3), 0.0)
    assert stats.staleness == {0: 6}
    counts = await world.clean(ledger)
    assert (counts["trained"], counts["filtered"]) == (6, groups)
    ((_, row),) = world.hooks.of("train")
    assert row["counts"] == (await ledger.live()).counts
    assert row["dropped"] == {"filtered": groups}
    await ledger.commit_checkpoint(incarnation=1, step=1, path="p")
    counts = await world.clean(ledger)
    assert (counts["durable"], counts["trained"], counts["filtered"]) == (6, 0, groups)
    found, _ = await ledger.trajectories.page(purpose="train", page_size=50, page_token="")
    assert {(each.group_id, each.index) for each in found} == trained(share)


async def test_a_filter_is_given_what_those_before_it_have_kept(
    store: Store, worlds: Worlds
) -> None:
    world = keeping(worlds, store, [1, 2, 3], [0, 2])
    ledger = await world.started()
    leased = await world.filled(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert trained(share) == {(a.group_id, i) for a in leased[:2] for i in (1, 3)}
    assert (await world.clean(ledger))["filtered"] == 2 * len(leased)


async def test_a_filter_may_drop_what_another_has_left(store: Store, worlds: Worlds) -> None:
    """The first and third episode of each group have the same reward."""
    world = make(worlds, store, {"kind": "these", "indices": [0, 2]}, "zero_variance", group_size=G)
    ledger = await world.started()
    leased = await world.filled(ledger)
    counts = await world.clean(ledger)
    assert counts["filtered"] == counts["dropped"] == G * len(leased)
    assert await payloads(store) == set()


async def test_a_group_of_which_one_episode_is_kept_is_trained(
    store: Store, worlds: Worlds
) -> None:
    world = make(worlds, store, "successes", max_staleness=0)
    ledger = await world.started()
    for step in range(3):
        await world.filled(ledger, version=step)
        share = await world.trained(ledger, step)
        assert [(each.index, each.reward) for each in samples(share)] == [(1, 1.0)] * 2
    counts = await world.clean(ledger)
    assert (counts["trained"], counts["filtered"]) == (6, 6)


async def test_a_restart_and_a_rewind_change_nothing(store: Store, worlds: Worlds) -> None:
    world = keeping(worlds, store, [0, 1, 3], max_staleness=0)
    ledger = await world.started()
    shares: list[BatchShare] = []
    for step in range(3):
        await world.filled(ledger, version=step)
        ledger = await world.opened()
        await world.clean(ledger)
        shares.append(await world.trained(ledger, step))
        ledger = await world.opened()
        assert (await world.clean(ledger))["trained"] == 6 * (step + 1)
    await ledger.rewind(incarnation=1, step=0)
    counts = await world.clean(ledger)
    assert (counts["taken"], counts["trained"], counts["filtered"]) == (18, 0, 6)
    for step, before in enumerate(shares):
        ledger = await world.opened()
        again = await ledger.take(incarnation=1, step=step, rank=0, world=1)
        assert (again.batch_id, again.samples) == (before.batch_id, before.samples)
        await ledger.commit(incarnation=1, step=step, batch_id=again.batch_id, metrics={})
    counts = await world.clean(ledger)
    assert (counts["trained"], counts["filtered"]) == (18, 6)
    assert await payloads(store) == {
        f"{group}/{index}/1" for share in shares for group, index in trained(share)
    }


async def test_a_death_before_payloads_are_deleted_leaves_none(
    store: Store, worlds: Worlds
) -> None:
    world = keeping(worlds, store, [0, 1, 3])
    ledger = await world.started()
    leased = await world.filled(ledger)
    kept = await payloads(store)
    bytes_before = (await ledger.live()).payload_bytes
    for each in leased:
        await store.command("HSET", KEYS.payloads, f"{each.group_id}/2/1", b"left")
    ledger = await world.opened()
    assert await payloads(store) == kept
    assert (await ledger.live()).payload_bytes == bytes_before


async def test_what_is_left_out_is_not_submitted_twice(store: Store, worlds: Worlds) -> None:
    world = keeping(worlds, store, [0, 1, 3])
    ledger = await world.started()
    first, *_ = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    await ledger.submit(world.whole([first]))
    for _ in range(2):
        outcomes = await ledger.submit(world.whole([first]))
        assert outcomes == ["duplicate", "duplicate", "dropped", "duplicate"]
        assert len(await payloads(store)) == 3
        await world.clean(ledger)
        ledger = await world.opened()


async def test_advantages_are_told_of_all_episodes_of_a_group(store: Store, worlds: Worlds) -> None:
    world = make(
        worlds,
        store,
        {"kind": "these", "indices": [1, 3]},
        group_size=G,
        advantage="stored_mean",
        max_staleness=0,
    )
    ledger = await world.started()
    await world.filled(ledger)
    share = await world.trained(ledger, 0)
    assert {each.reward for each in samples(share)} == {1.0}
    (memory,) = await store.hashes(KEYS.memory)
    assert [json.loads(text) for text in memory.values()] == [[2.0, G]] * 2


@pytest.mark.parametrize("taken", [False, True])
async def test_the_rest_of_a_group_is_dropped_for_its_own_reason(
    store: Store, worlds: Worlds, taken: bool
) -> None:
    world = keeping(worlds, store, [1, 2])
    ledger = await world.started()
    groups = len(await world.filled(ledger))
    if taken:
        await ledger.take(incarnation=1, step=0, rank=0, world=1)
    await ledger.completion.cancel()
    counts = await world.clean(ledger)
    assert (counts["filtered"], counts["cancelled"]) == (2 * groups, 2 * groups)
    assert counts["dropped"] == counts["admitted"]
    assert await payloads(store) == set()


async def test_old_tokens_that_are_left_out_make_no_group_stale(
    store: Store, worlds: Worlds
) -> None:
    world = keeping(worlds, store, [1, 2, 3], max_staleness=1)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    first, *others = leased
    await ledger.submit(world.whole(others))
    for step in range(2):
        if step:
            await world.filled(ledger, version=step)
        await world.trained(ledger, step)
    late = [world.made(first, i, reward=i % 2, version=2 if i else 0) for i in range(G)]
    await ledger.submit(late)
    await world.filled(ledger, version=2)
    share = await ledger.take(incarnation=1, step=2, rank=0, world=1)
    assert share.stats.staleness_max <= 1
    assert Counter(name for name, _ in trained(share))[first.group_id] == 3
    assert "stale" not in await world.clean(ledger)


@pytest.mark.parametrize(
    "column",
    [
        {"rewards": [1.0]},
        {"answers": ["b"]},
        {"lengths": [5]},
        {"truncated": [True]},
        {"style": [0.25]},
    ],
)
async def test_filters_see_the_columns_of_a_group(
    store: Store, worlds: Worlds, column: dict[str, Any]
) -> None:
    """The third of each group has other values than the others."""
    world = make(worlds, store, {"kind": "having", **column}, group_size=G)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    for each in leased:
        usual = [world.made(each, place) for place in (0, 1, 3)]
        score = Score(reward=1.0, parts={"exact": 0.0, "style": 0.25}, normalised_answer="b")
        third = world.made(each, 2, truncated=True, tokens=5)
        await ledger.submit([*usual, replace(third, score=score)])
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert trained(share) == {(each.group_id, 2) for each in leased[:2]}
    await world.clean(ledger)


async def test_repaired_episodes_are_generated_again_and_the_rest_is_kept(
    store: Store, worlds: Worlds
) -> None:
    world = make(worlds, store, "repairing", batch_groups=1, max_staleness=0, group_size=3)
    ledger = await world.started()
    (first,) = await ledger.leases.lease(worker_id="w", train=3, evals=0)
    done = [world.made(first, place, reward=float(place != 1)) for place in range(3)]
    assert await ledger.submit(done) == ["accepted"] * 3
    assert await payloads(store) == {"j1.0/0/1", "j1.0/2/1"}
    ledger = await world.opened()
    (again,) = await ledger.leases.lease(worker_id="w", train=3, evals=0)
    assert (again.group_id, again.indices, again.seed) == ("j1.0", (3,), first.seed)
    assert await ledger.submit(done[1:2]) == ["dropped"]
    await ledger.submit([world.made(again, 0, reward=1.0)])
    share = await world.trained(ledger, 0)
    assert trained(share) == {("j1.0", 0), ("j1.0", 2), ("j1.0", 3)}
    counts = await world.clean(ledger)
    assert (counts["admitted"], counts["trained"], counts["repaired"]) == (4, 3, 1)


async def test_a_group_is_repaired_three_times_at_most(store: Store, worlds: Worlds) -> None:
    """What is still poor then is left out, and a group of which nothing is left is dropped."""
    world = make(worlds, store, "repairing", batch_groups=1, max_staleness=0)
    ledger = await world.started()
    sizes: list[int] = []
    while True:
        (leased,) = await ledger.leases.lease(worker_id="w", train=2, evals=0)
        if leased.group_id != "j1.0":
            break
        sizes.append(len(leased.indices))
        every = range(len(leased.indices))
        await ledger.submit([world.made(leased, place, reward=0.0) for place in every])
    assert sizes == [2, 2, 2, 2]
    live = await ledger.live()
    assert live.dropped == {"repaired": 6, "filtered": 2}
    assert live.filtered == {"not repaired": 1}
    await ledger.submit([world.made(leased, place, reward=float(place)) for place in range(2)])
    for _ in range(3):
        (leased,) = await ledger.leases.lease(worker_id="w", train=2, evals=0)
        await ledger.submit([world.made(leased, 0, reward=0.0)])
    assert trained(await world.trained(ledger, 0)) == {("j1.1", 1)}
    await world.clean(ledger)


async def test_groups_are_counted_by_the_reason_of_the_filter(store: Store, worlds: Worlds) -> None:
    world = make(worlds, store, "successes", "zero_variance", batch_groups=1, max_staleness=0)
    ledger = await world.started()
    for reward in (0.0, 0.0, 1.0):
        (leased,) = await ledger.leases.lease(worker_id="w", train=2, evals=0)
        await ledger.submit([world.made(leased, place, reward=reward) for place in range(2)])
    assert (await ledger.live()).filtered == {"none": 2, "zero_variance": 1}
    assert (await world.opened()).counts["filter:none"] == 2
    await world.clean(ledger)


@pytest.mark.parametrize(
    ("rewards", "repairable", "kept", "reason"),
    [
        ((1.0, 0.0, 0.2), 3, (0, 1, 2), ""),  # generated again, so nothing is decided yet
        ((1.0, 0.0, 0.7), 0, (0, 2), ""),
        ((1.0, 0.0, 1.0), 0, (), "zero_variance"),  # filters behind see what is left
        ((0.0, 0.2), 0, (), "not repaired"),
        ((1.0, 0.7, 0.0), 2, (0, 1), ""),  # what is stored cannot be generated again
    ],
)
async def test_filters_decide_on_what_is_left_if_nothing_is_generated_again(
    rewards: tuple[float, ...], repairable: int, kept: tuple[int, ...], reason: str
) -> None:
    chain = FilterChain(
        parse_job(
            {
                "name": "sums",
                "model": {"path": "m"},
                "tasks": {"environment": "arithmetic"},
                "reward": ["exact"],
                "experience": {"filters": ["repairing", "zero_variance"]},
            }
        )
    )
    size = len(rewards)
    group = FinishedGroup(0, rewards, ("",) * size, (1,) * size, (False,) * size)
    found = await chain.decision(group, repairable=repairable)
    assert (found.kept, found.reason) == (kept, reason)
    assert bool(found.repair) == (repairable == size)
