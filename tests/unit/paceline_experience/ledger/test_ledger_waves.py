"""Allocators: groups of any size, second waves, early ends, episodes that continue a sibling."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.data import JobData
from paceline.errors import InvalidError
from paceline.types import EpisodeStart, Score
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_experience.ledger.sources import try_plugins

if TYPE_CHECKING:
    from paceline.types import Assignment
    from paceline_experience.ledger.ledger import BatchShare, JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

DEEP: dict[str, Any] = {
    "allocator": {"kind": "depth", "width": 2},
    "group_size": 3,
    "batch_groups": 1,
    "max_staleness": 0,
    "filters": [],
}


async def played(
    world: World, ledger: JobLedger, reward: float, *, credits: int = 100, version: int = 0
) -> list[Assignment]:
    """Lease and finish episodes, all with the same reward."""
    leased = await ledger.leases.lease(worker_id="w", train=credits, evals=0)
    done = [
        world.made(a, place, reward=reward, version=version)
        for a in leased
        for place in range(len(a.indices))
    ]
    if done:
        await ledger.submit(done)
    return leased


def samples_of(share: BatchShare) -> list[pb.TrainSample]:
    return [pb.TrainSample.FromString(data) for data in share.samples]


async def test_a_group_gets_a_second_wave_and_a_task_that_was_solved_one_episode(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience=DEEP, num_tasks=1)
    ledger = await world.started()
    (first,) = await played(world, ledger, 0.0)
    assert (first.indices, first.starts) == ((0, 1), ())
    assert (await ledger.live()).open_groups == 1
    ledger = await world.opened()  # the second wave survives a restart
    second = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    assert [a.indices for a in second] == [(2, 3)]
    assert second[0].starts == (EpisodeStart(variant="deep", temperature=1.5),) * 2
    await ledger.submit([world.made(second[0], place, reward=1.0) for place in range(2)])
    (third,) = await played(world, ledger, 0.5)
    assert third.indices == (4,)
    assert third.group_id == first.group_id
    assert len({first.seed, second[0].seed, third.seed}) == 1
    share = await world.trained(ledger, 0)
    assert sorted(s.index for s in samples_of(share)) == [0, 1, 2, 3, 4]
    (after,) = await ledger.leases.lease(worker_id="w", train=100, evals=0)
    assert after.indices == (0,)
    counts = await world.clean(ledger)
    assert (counts["admitted"], counts["trained"], counts["leased"]) == (6, 5, 1)


async def test_a_wave_that_was_begun_comes_again_after_its_worker_dies(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience=DEEP)
    ledger = await world.started()
    await played(world, ledger, 0.0)
    lost = await ledger.leases.lease(worker_id="gone", train=3, evals=0)
    await ledger.leases.release(worker_id="gone")
    again = await ledger.leases.lease(worker_id="w", train=3, evals=0)
    assert [(a.indices, a.starts) for a in again] == [(a.indices, a.starts) for a in lost]
    await world.clean(ledger)


SEEDING: dict[str, Any] = {**DEEP, "allocator": {"kind": "seeding"}, "group_size": 2}


async def test_a_start_brings_the_tasks_that_it_names(store: Store, worlds: Worlds) -> None:
    """Those that were solved before: the first one, after a restart."""
    world = worlds(store, experience=SEEDING)
    ledger = await world.started()
    (first,) = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    score = Score(1.0, {}, normalised_answer="42")
    await ledger.submit([replace(world.made(first, place), score=score) for place in range(2)])
    await world.trained(ledger, 0)
    ledger = await world.opened()
    await played(world, ledger, 0.0, version=1)
    (second,) = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    assert second.tasks == (first.task,)
    assert {each.variant for each in second.starts} == {"seeded"}
    assert {each.tasks for each in second.starts} == {(0,)}
    assert json.loads(second.starts[0].meta) == {"answers": ["42"]}
    await world.clean(ledger)


async def test_a_start_that_names_no_task_fails_its_group(store: Store, worlds: Worlds) -> None:
    far = {**SEEDING, "allocator": {"kind": "seeding", "far": True}}
    world = worlds(store, experience=far)
    ledger = await world.started()
    await played(world, ledger, 0.0)
    assert await ledger.leases.lease(worker_id="w", train=1, evals=0) == []
    assert (await ledger.live()).dropped["invalid"] == 3
    await world.clean(ledger)


async def test_redundancy_keeps_the_first_to_finish_and_aborts_the_rest(
    store: Store, worlds: Worlds
) -> None:
    many = {"allocator": {"kind": "redundancy", "extra": 2}, "batch_groups": 1, "filters": []}
    world = worlds(store, experience={**many, "group_size": 2})
    ledger = await world.started()
    (slow,) = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    assert slow.indices == (0, 1, 2, 3)
    await ledger.submit([world.made(slow, 3, reward=1.0)])
    assert (await ledger.live()).open_groups == 1
    await ledger.submit([world.made(slow, 1, reward=0.0)])
    live = await ledger.live()
    assert (live.ready_groups, live.dropped) == (1, {"surplus": 2})
    told = [(key.index, key.attempt, key.reason) for key in ledger.recalled("w")]
    assert told == [(0, 1, None), (2, 1, None)]  # at once, not at the next renewal
    assert ledger.recalled("w") == []
    outcomes = await ledger.submit([world.made(slow, 0, reward=1.0)])
    assert outcomes == ["dropped"]
    share = await world.trained(ledger, 0)
    assert sorted(s.index for s in samples_of(share)) == [1, 3]
    (many_at_once,) = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    await ledger.submit([world.made(many_at_once, place, version=1) for place in (2, 0, 3, 1)])
    share = await world.trained(ledger, 1)
    assert sorted(s.index for s in samples_of(share)) == [0, 2]
    assert (await world.clean(ledger))["surplus"] == 4


async def test_a_child_continues_its_sibling_and_trains_only_its_own_tokens(
    store: Store, worlds: Worlds
) -> None:
    """One policy token is kept of the parent, which has two tokens of prompt before it."""
    waves = {"allocator": {"kind": "any_waves", "deed": "child"}, "batch_groups": 1, "filters": []}
    shaping = {"advantage_shaping": [{"kind": "shared_prefix"}]}
    world = worlds(store, experience={**waves, **shaping, "max_staleness": 0})
    ledger = await world.started()
    await played(world, ledger, 0.0)
    (child,) = await ledger.leases.lease(worker_id="w", train=1, evals=0)
    (start,), (begun,) = child.starts, child.progress
    assert start.variant == "next"
    kept = begun.transcripts[0]
    assert (start.parent_tokens, kept.branch_token, kept.num_policy_tokens) == (3, 3, 1)
    assert kept.parent == start.parent
    assert begun.actions == ()  # the turn is cut off
    done = world.made(child, 0, reward=1.0)
    whole = replace(done.transcripts[0], parent=kept.parent, branch_token=3)
    await ledger.submit([replace(done, transcripts=(whole,))])
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    (sample,) = [s for s in samples_of(share) if s.index == child.indices[0]]
    assert len(sample.tokens) == 5
    assert len(sample.logprobs) == sum(run.count for run in sample.versions) == 2
    policy = [(s.start, s.end) for s in sample.spans if s.source == types_pb2.TOKEN_SOURCE_POLICY]
    assert policy == [(3, 5)]
    (parent,) = [s for s in samples_of(share) if s.index == kept.parent]
    assert parent.advantages[0] == sample.advantages[0] > 0.0  # it led to the success
    assert max(parent.advantages[1:]) < 0.0
    assert share.total_tokens == sum(len(s.logprobs) for s in samples_of(share))
    assert share.stats.batch_tokens == share.total_tokens
    await world.clean(ledger)


async def test_admission_counts_with_the_mean_size_of_the_last_groups(
    store: Store, worlds: Worlds
) -> None:
    many = {"allocator": {"kind": "redundancy", "extra": 4}, "batch_groups": 1, "filters": []}
    bounded = {**many, "group_size": 2, "max_in_flight": 13, "max_staleness": 5}
    world = worlds(store, experience=bounded)
    ledger = await world.started()
    assert ledger.leases.demand().group == 2  # nothing is known yet
    leased = await ledger.leases.lease(worker_id="w", train=6, evals=0)
    await ledger.submit(world.whole(leased))
    live = await ledger.live()
    assert (ledger.leases.demand().group, live.group_size, live.headroom_groups) == (6, 6, 2)
    assert (await world.opened()).leases.demand().group == 6
    await world.clean(ledger)


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("start", "experience.allocator: any_waves: ZeroDivisionError"),
        ("crowd", "any_waves: ValueError: more than 512 episodes; 1 to 512 are allowed in a wave"),
        ("more", "experience.allocator: any_waves: ZeroDivisionError"),
        ("orphan", "any_waves: ValueError: parent 99 is no finished episode of the group"),
    ],
)
async def test_one_that_errs_is_refused_or_fails_its_job(
    store: Store, worlds: Worlds, deed: str, says: str
) -> None:
    wrong = {"allocator": {"kind": "any_waves", "deed": deed}, "max_staleness": 0}
    world = worlds(store, experience=wrong)
    with pytest.raises(InvalidError, match=says):
        await asyncio.to_thread(try_plugins, world.spec, JobData())
    ledger = await world.started()
    for _ in range(20):
        await played(world, ledger, 0.0)
        await ledger.sweep()
    ((state, reason),) = set(world.hooks.ends)
    assert state == "failed"
    assert says in reason
