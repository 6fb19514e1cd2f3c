"""What must not depend on who is fast or who dies: the order of tasks, seeds and batches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from paceline.types import Assignment
from paceline.v1 import experience_pb2 as pb

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import BatchShare
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import Worlds


def order(share: BatchShare) -> list[tuple[str, int]]:
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    return [(s.group_id, s.index) for s in samples]


def what(assignments: list[Assignment]) -> list[tuple[str, int]]:
    return [(a.task.task_id, a.seed) for a in assignments]


async def test_a_batch_has_the_order_of_tasks_not_of_completion(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience={"batch_groups": 12, "max_staleness": 0})
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    for trajectory in reversed(world.whole(leased)):
        await ledger.submit([trajectory])
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert order(share) == [(f"j1.{seq}", index) for seq in range(12) for index in range(2)]


@pytest.mark.parametrize(("staleness", "floors"), [(0, [0, 1, 2, 3]), (2, [0, 0, 0, 1])])
async def test_assignments_carry_the_minimum_version(
    store: Store, worlds: Worlds, staleness: int, floors: list[int]
) -> None:
    world = worlds(store, experience={"max_staleness": staleness})
    ledger = await world.started()
    found: list[int] = []
    for step in range(4):
        leased = await world.filled(ledger, version=step)
        found += {a.min_version for a in leased}
        await world.trained(ledger, step)
    assert found == floors


async def test_a_stale_group_comes_again_with_its_task_and_seed(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience={"max_staleness": 0})
    ledger = await world.started()
    await world.filled(ledger)
    await world.trained(ledger, 0)
    stale = await world.filled(ledger, version=0)  # one step too old
    trainer = await world.waiting(ledger, 1)
    assert (await world.clean(ledger))["stale"] == 4
    ledger = await world.opened()
    again = await world.filled(ledger, version=1)
    assert [a.group_id for a in again] == ["j1.2.1", "j1.3.1"]
    assert what(again) == what(stale)
    trainer.cancel()
    share = await ledger.take(incarnation=1, step=1, rank=0, world=1)
    assert [name for name, _ in order(share)] == ["j1.2.1"] * 2 + ["j1.3.1"] * 2
    await world.clean(ledger)


async def test_a_task_does_not_come_again_for_ever(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience={"max_staleness": 0, "max_attempts": 2})
    ledger = await world.started()
    await world.filled(ledger)
    await world.trained(ledger, 0)
    names: list[str] = []
    trainer = await world.waiting(ledger, 1)
    for _ in range(4):
        names += [a.group_id for a in await world.filled(ledger, version=0)]
        while (await ledger.live()).ready_groups:
            await asyncio.sleep(0.001)
    trainer.cancel()
    assert names[::2] == ["j1.2", "j1.2.1", "j1.2.2", "j1.4"]
