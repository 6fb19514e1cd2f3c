"""Modes: what is leased when, what is recalled, and how lengths of what is lost are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from paceline.enums import GiveBackReason
from paceline.types import EpisodeProgress

if TYPE_CHECKING:
    from paceline.types import Assignment
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

APRIL: dict[str, Any] = {
    "mode": "april",
    "batch_groups": 1,
    "group_size": 2,
    "max_staleness": 1,
    "max_attempts": 1,
    "filters": [],
}


async def hand_over(world: World, ledger: JobLedger, held: list[Assignment], version: int) -> None:
    """Give back what is recalled, with two tokens of progress each."""
    owned = {(a.group_id, index): (a, place) for a in held for place, index in enumerate(a.indices)}
    keys = ledger.recalled("w")
    assert all(key.reason is GiveBackReason.DRAIN for key in keys)
    so_far = [
        EpisodeProgress(
            key.group_id,
            key.index,
            key.attempt,
            world.made(*owned[key.group_id, key.index], version=version, tokens=2).transcripts,
        )
        for key in keys
    ]
    await ledger.renew(worker_id="w", keys=(), progress=so_far)
    await ledger.give_back(worker_id="w", keys=keys)


async def test_april_recalls_what_is_open_once_a_batch_is_full_and_continues_it_first(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience=APRIL)
    ledger = await world.started()
    quick, slow = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    assert ledger.recalled("w") == []
    await ledger.submit(world.whole([quick]))
    await hand_over(world, ledger, [slow], 0)
    live = await ledger.live()
    assert (live.ready_groups, live.counts["queued"], live.counts["leased"]) == (1, 2, 0)
    assert (ledger.leases.demand().queued, ledger.leases.demand().new) == (0, 0)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert (
        await ledger.leases.lease(worker_id="w", train=4, evals=0) == []
    )  # the trainer has the batch
    await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
    assert await ledger.leases.lease(worker_id="w", train=4, evals=0) == []  # no newer weights yet
    await ledger.publish_version(incarnation=1, step=1, parent=0, num_bytes=1)
    ledger.serve([0])
    assert await ledger.leases.lease(worker_id="w", train=4, evals=0) == []
    ledger.serve([0, 1])
    first, *_ = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    # With one attempt, it would be dropped if the recall had used it up.
    assert (first.group_id, first.attempts) == (slow.group_id, (2, 2))
    assert [p.transcripts[0].num_policy_tokens for p in first.progress] == [2, 2]
    await ledger.submit(world.whole([first], version=0))
    share = await world.trained(ledger, 1)
    assert (share.stats.resumed_share, share.stats.resumed_tokens_mean) == (1.0, 3.0)
    assert "stale" not in await world.clean(ledger)


async def test_with_april_a_finished_episode_is_never_lost_to_a_recall(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience=APRIL)
    ledger = await world.started()
    quick, slow = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    await ledger.submit(world.whole([quick]))
    late = world.whole([slow])
    await hand_over(world, ledger, [slow], 0)
    assert await ledger.submit(late) == ["accepted"] * 2  # finished while it was recalled
    assert (await ledger.live()).ready_groups == 2
    await world.clean(ledger)


async def test_with_april_what_is_too_old_to_be_continued_begins_anew(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience=APRIL)
    ledger = await world.started()
    held = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    await ledger.submit(world.whole(held[:1]))
    await hand_over(world, ledger, held, 0)
    await world.trained(ledger, 0)
    leased = await ledger.leases.lease(worker_id="w", train=6, evals=0)
    assert leased[0].group_id == held[1].group_id
    await ledger.submit(world.whole(leased[1:2], version=1))
    await hand_over(world, ledger, leased, 0)
    await world.trained(ledger, 1)
    anew, *_ = await ledger.leases.lease(worker_id="w", train=6, evals=0)
    assert anew.group_id == f"{held[1].group_id}.1"  # its tokens would be two steps old
    assert (anew.seed, anew.progress) == (held[1].seed, ())
    assert (await world.clean(ledger))["stale"] == 2


async def test_coupled_waits_for_the_slowest_worker(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience={"mode": "coupled", "max_staleness": 0, "batch_groups": 1})
    ledger = await world.started()
    ledger.serve([0])
    await world.filled(ledger)
    await world.trained(ledger, 0)
    ledger.serve([0, 1])
    assert (
        ledger.leases.demand().new,
        await ledger.leases.lease(worker_id="w", train=9, evals=0),
    ) == (0, [])
    ledger.serve([1])
    assert len(await ledger.leases.lease(worker_id="w", train=9, evals=0)) == 1


async def test_rollout_wise_fills_single_slots(store: Store, worlds: Worlds) -> None:
    for mode, got in (("asynchronous", []), ("rollout_wise", [(1,), (0,)])):
        world = worlds(store, experience={"mode": mode, "group_size": 2, "max_staleness": 1})
        world.job_id = mode
        ledger = await world.started()
        await ledger.leases.lease(worker_id="w", train=3 if got else 2, evals=0)
        assert ledger.leases.demand().group == (1 if got else 2)
        found = [
            a for _ in "ab" for a in await ledger.leases.lease(worker_id="w", train=1, evals=0)
        ]
        assert [a.indices for a in found] == got


async def test_lengths_of_what_is_lost_are_told_with_the_next_batch(
    store: Store, worlds: Worlds
) -> None:
    """Six tokens were dropped by the filter, four aborted as surplus, and three trained."""
    many = {"allocator": {"kind": "redundancy", "extra": 1}, "group_size": 2, "batch_groups": 1}
    world = worlds(store, experience={**many, "max_staleness": 0})
    ledger = await world.started()
    (first,) = await ledger.leases.lease(worker_id="w", train=3, evals=0)
    told = EpisodeProgress(
        first.group_id, 2, first.attempts[2], world.made(first, 2, tokens=4).transcripts
    )
    await ledger.renew(worker_id="w", keys=(), progress=[told])
    await ledger.submit([world.made(first, place, tokens=6) for place in range(2)])
    (second,) = await ledger.leases.lease(worker_id="w", train=3, evals=0)
    await ledger.submit(
        [world.made(second, place, reward=float(place), tokens=3) for place in range(2)]
    )
    stats = (await ledger.take(incarnation=1, step=0, rank=0, world=1)).stats
    assert (stats.dropped_share, stats.dropped_tokens_mean) == (0.5, 6.0)
    assert (stats.aborted_share, stats.aborted_tokens_mean) == (pytest.approx(1 / 3), 4.0)
    assert (stats.resumed_share, stats.response_tokens_mean) == (0.0, 3.0)
    await world.clean(ledger)


@pytest.mark.parametrize(
    ("mode", "staleness", "says"),
    [("april", 0, "at least 1 is needed"), ("coupled", 1, "with experience.mode coupled; 0 is")],
)
def test_modes_that_do_not_fit_the_staleness_are_refused(
    store: Store, worlds: Worlds, mode: str, staleness: int, says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        worlds(store, experience={"mode": mode, "max_staleness": staleness})
