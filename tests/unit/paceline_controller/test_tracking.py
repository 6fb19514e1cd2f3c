"""The tracking process comes with the first job that wants it, and no job depends on it."""

from __future__ import annotations

import pytest

from paceline.config import parse_job
from paceline.config.service import ControllerOptions
from paceline.enums import JobState
from paceline.errors import UnavailableError
from paceline_controller.jobs.plan import LiveJob, replicas_of
from paceline_controller.reconciler import Reconciler
from paceline_harness.runtime import FakeClock, MemoryLedger, MemoryRuntime

OPTIONS = ControllerOptions(start_timeout_s=30, max_restart_backoff_s=4, give_up_after=3)
JOB = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
}


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.runtime = MemoryRuntime(expand=replicas_of)
        self.ledger = MemoryLedger()
        self.owes = False
        self.away = False
        self.reconciler = Reconciler(
            ledger=self.ledger,
            runtime=self.runtime,
            options=OPTIONS,
            child_grace_s=1.0,
            untracked=self.untracked,
            clock=self.clock,
        )

    async def untracked(self) -> bool:
        if self.away:
            raise UnavailableError("away")
        return self.owes

    def submit(self, *tracking: str) -> None:
        spec = parse_job({**JOB, "tracking": tracking})
        self.ledger.jobs["a-1"] = LiveJob("a-1", JobState.RUNNING, 0, spec)

    async def passes(self, number: int = 1) -> None:
        for _ in range(number):
            await self.reconciler.once()
            await self.reconciler.settle()
            self.clock.pass_s(1.0)

    @property
    def tracks(self) -> bool:
        found = self.runtime.running.get("tracking-0")
        return found is not None and found.alive


@pytest.fixture
def world() -> World:
    return World()


async def test_it_is_not_there_without_a_job_that_wants_it(world: World) -> None:
    world.submit()
    await world.passes(3)
    assert not world.tracks


async def test_it_comes_with_a_job_and_stays_when_that_is_over(world: World) -> None:
    world.submit("tensorboard")
    await world.passes()
    assert world.tracks
    del world.ledger.jobs["a-1"]
    await world.passes(3)
    assert world.tracks


async def test_what_an_earlier_run_owes_brings_it_back(world: World) -> None:
    world.owes = world.away = True
    await world.passes(2)
    assert not world.tracks
    world.away = False
    await world.passes()
    assert world.tracks


async def test_no_job_fails_because_it_never_gets_on(world: World) -> None:
    world.submit("tensorboard")
    for _ in range(60):
        await world.passes()
        if world.tracks:
            world.runtime.die("tracking-0")
    starts = [name for name, _ in world.runtime.starts if name == "tracking-0"]
    assert len(starts) > OPTIONS.give_up_after
    assert world.ledger.jobs["a-1"].state is JobState.RUNNING
