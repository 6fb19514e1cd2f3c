"""Samplers that learn: told of every group once, and unchanged by any crash."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.data import JobData
from paceline.errors import InvalidError
from paceline.v1 import experience_pb2 as pb
from paceline_experience.ledger.sources import try_plugins
from paceline_experience.store.keys import JobKeys

if TYPE_CHECKING:
    from paceline.types import Assignment, Trajectory
    from paceline_experience.ledger.ledger import BatchShare, JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

LEARNING: dict[str, Any] = {
    "sampler": {"kind": "weakest", "width": 4},
    "filters": [{"kind": "zero_variance"}],
    "max_staleness": 0,
    "group_size": 4,
}


def played(world: World, leased: list[Assignment]) -> list[Trajectory]:
    """Task t solves t % 4 of the 4 episodes of a group, so every fourth task is filtered."""
    version = max(0, *(a.min_version for a in leased))
    return [
        world.made(a, place, reward=float(index < a.task.seed % 4), version=version)
        for a in leased
        for place, index in enumerate(a.indices)
    ]


async def memory_of(world: World) -> dict[str, Any]:
    (found,) = await world.store.hashes(JobKeys("default", world.job_id).memory)
    return {key.decode().partition("/")[2]: json.loads(text) for key, text in found.items()}


def contents(share: BatchShare) -> list[tuple[str, int, float]]:
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    return [(s.group_id.partition(".")[2], s.index, s.reward) for s in samples]


async def fill(world: World, ledger: JobLedger, batch: asyncio.Task[BatchShare]) -> BatchShare:
    """Play what can be leased until the trainer has its batch."""
    while not batch.done():
        leased = await ledger.leases.lease(worker_id="w", train=100, evals=0)
        if leased:
            await ledger.submit(played(world, leased))
        await asyncio.sleep(0.001)
    return await batch


async def undisturbed(world: World, steps: int) -> list[Any]:
    ledger = await world.started()
    found: list[Any] = []
    for step in range(steps):
        waits = asyncio.create_task(ledger.take(incarnation=1, step=step, rank=0, world=1))
        share = await fill(world, ledger, waits)
        found.append(contents(share))
        await ledger.commit(incarnation=1, step=step, batch_id=share.batch_id, metrics={})
        await ledger.publish_version(incarnation=1, step=step + 1, parent=step, num_bytes=1)
    await world.clean(ledger)
    return found


async def test_a_sampler_sees_what_filters_drop_and_turns_to_the_weakest(
    store: Store, worlds: Worlds
) -> None:
    world = replace(worlds(store, experience=LEARNING), num_tasks=8)
    found = await undisturbed(world, 3)
    memory = await memory_of(world)
    # Tasks 0 and 4 never succeed: they are filtered, so only the sampler hears of them.
    assert memory["task0"][0] == 0.0 < memory["task0"][1]
    assert all(count == 1 for key, count in memory.items() if key.startswith("seen"))
    assert len(found) == 3
    (left,) = await world.store.hashes(JobKeys("default", "j1").outcomes)
    assert not left


async def test_groups_that_are_given_up_are_told_with_the_reason(
    store: Store, worlds: Worlds
) -> None:
    tried_once = {**LEARNING, "max_attempts": 1, "max_staleness": 1, "batch_groups": 1}
    world = replace(worlds(store, experience=tried_once), num_tasks=8)
    ledger = await world.started()
    await ledger.leases.lease(worker_id="gone", train=4, evals=0)
    await ledger.leases.release(worker_id="gone")  # infrastructure failed: the task comes once more
    waits = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    again = await ledger.leases.lease(worker_id="gone", train=4, evals=0)
    assert [a.group_id for a in again] == ["j1.0.1"]
    await ledger.leases.release(worker_id="gone")
    await fill(world, ledger, waits)
    memory = await memory_of(world)
    assert memory["failed group_failed"] == [0.0, 1]
    assert memory["seen1"] == 1
    await world.clean(ledger)


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("raise", "experience.sampler: weakest: ZeroDivisionError"),
        ("swell", "weakest: ValueError: memory 'big' has 5002 bytes; at most 4096 are allowed"),
    ],
)
async def test_one_that_cannot_learn_is_refused_or_fails_its_job(
    store: Store, worlds: Worlds, deed: str, says: str
) -> None:
    await asyncio.to_thread(try_plugins, worlds(store, experience=LEARNING).spec, JobData())
    wrong = {**LEARNING, "sampler": {"kind": "weakest", "deed": deed}}
    world = worlds(store, experience=wrong)
    with pytest.raises(InvalidError, match=says):
        await asyncio.to_thread(try_plugins, world.spec, JobData())
    ledger = await world.started()
    waits = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    while not world.hooks.ends:
        leased = await ledger.leases.lease(worker_id="w", train=100, evals=0)
        if leased:
            await ledger.submit(played(world, leased))
        await ledger.sweep()
        await asyncio.sleep(0.001)
    ((state, reason),) = world.hooks.ends
    assert state == "failed"
    assert says in reason
    await waits
