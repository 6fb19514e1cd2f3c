"""Filters of groups that fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from paceline import plugins

if TYPE_CHECKING:
    from conftest import World, Worlds

    from paceline_experience.store import Store


def divide(rewards: list[float]) -> str:
    return str(len(rewards) / 0)


def leave(rewards: list[float]) -> str:
    sys.exit(len(rewards) + 1)


@pytest.fixture
def filtered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts a function into the place of a filter."""
    find = plugins.find

    def install(check: Callable[..., Any]) -> None:
        def found(group: str, name: str) -> Any:
            return check if group == "filters" else find(group, name)

        monkeypatch.setattr(plugins, "find", found)

    return install


def make(worlds: Worlds, store: Store) -> World:
    return worlds(store, experience={"filters": ["zero_variance"]})


async def test_a_group_on_which_a_filter_fails_is_dropped_and_others_are_not(
    store: Store, worlds: Worlds, filtered: Callable[..., None]
) -> None:
    def check(rewards: list[float]) -> str:
        return "" if rewards[0] else str(1 / rewards[0])

    filtered(check)
    world = make(worlds, store)
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
    ("check", "says"),
    [(divide, "ZeroDivisionError: division by zero"), (leave, "SystemExit: 3")],
)
async def test_a_job_whose_filter_fails_on_every_group_ends(
    store: Store, worlds: Worlds, filtered: Callable[..., None], check: Any, says: str
) -> None:
    filtered(check)
    world = make(worlds, store)
    ledger = await world.started()
    await world.filled(ledger)
    await ledger.sweep()
    assert world.hooks.ends == [("failed", f"experience.filters.0: zero_variance: {says}")]
    await world.clean(ledger)
