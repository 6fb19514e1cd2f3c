"""Filters of groups that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import World, Worlds

    from paceline_experience.store.store import Store


def make(worlds: Worlds, store: Store, kind: str) -> World:
    return worlds(store, experience={"filters": [kind]})


async def test_a_group_on_which_a_filter_fails_is_dropped_and_others_are_not(
    store: Store, worlds: Worlds
) -> None:
    world = make(worlds, store, "choosy")
    ledger = await world.started()
    first, second, *_ = leased = await ledger.lease(worker_id="w", train=8, evals=0)
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
    ("kind", "says"),
    [("dividing", "ZeroDivisionError: division by zero"), ("leaving", "SystemExit: 3")],
)
async def test_a_job_whose_filter_fails_on_every_group_ends(
    store: Store, worlds: Worlds, kind: str, says: str
) -> None:
    world = make(worlds, store, kind)
    ledger = await world.started()
    await world.filled(ledger)
    await ledger.sweep()
    assert world.hooks.ends == [("failed", f"experience.filters.0: {kind}: {says}")]
    await world.clean(ledger)
