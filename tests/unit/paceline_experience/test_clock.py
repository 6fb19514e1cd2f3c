"""The time of a job passes, whatever the clocks of machines are set to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.store.clock import JobClock
from paceline_experience.store.store import Store

from .conftest import World, Worlds

WALL_S = 150


@dataclass(slots=True)
class Machines:
    """The clock that somebody sets, and the one that nobody can."""

    wall_s: float = 1_800_000_000.0
    up_s: float = 77.0

    async def wall(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.up_s

    def pass_time(self, seconds: float) -> None:
        self.wall_s += seconds
        self.up_s += seconds

    def clock(self) -> JobClock:
        """The time of one life of the service."""
        return JobClock(self.wall, monotonic=self.monotonic)


@pytest.fixture
def machines() -> Machines:
    return Machines()


@pytest.fixture
async def world(store: Store, worlds: Worlds) -> World:
    return worlds(store, stop={"steps": 1000, "wall_s": WALL_S})


async def _is_over(ledger: JobLedger) -> bool:
    await ledger.sweep()
    return ledger.stopping


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
async def test_wall_s_is_time_that_has_passed(world: World, machines: Machines, jump: float):
    ledger = await world.started(clock=machines.clock())
    machines.pass_time(WALL_S / 2)
    machines.wall_s += jump
    assert not await _is_over(ledger)
    machines.pass_time(WALL_S / 2 - 1)
    assert not await _is_over(ledger)
    machines.pass_time(2)
    assert await _is_over(ledger)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
async def test_a_restart_goes_on_from_what_was_kept(world: World, machines: Machines, jump: float):
    ledger = await world.started(clock=machines.clock())
    for _ in range(10):
        machines.pass_time(10)
        assert not await _is_over(ledger)
    machines.wall_s += jump
    machines.up_s = 3.0  # the machine was started anew
    ledger = world.ledger(clock=machines.clock())
    await ledger.open()
    assert not await _is_over(ledger)
    machines.pass_time(WALL_S - 100 + 11)
    assert await _is_over(ledger)


async def test_leases_of_a_dead_worker_end_when_the_clock_is_set_back(
    world: World, machines: Machines
):
    ledger = await world.started(clock=machines.clock())
    leased = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    assert leased
    machines.wall_s -= 3600
    machines.pass_time(world.spec.experience.lease_s + 1)
    await ledger.sweep()
    assert ledger.held("w") == 0
