"""Turns that wait for room on a rollout worker."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.enums import WorkerKind
from paceline.errors import DeadlineError, VersionGoneError
from paceline.platform.telemetry.metrics import Metrics
from paceline.types import SamplingParams, Worker
from paceline_environment.rollouts.router import RolloutRouter, RouterSlot
from paceline_environment.rollouts.turn import PrefixHolders, Turn
from paceline_environment.roster import WorkerWatch
from paceline_environment.stages import Stages
from paceline_harness.patience import PATIENCE_S


def worker(name: str, *, job: str = "", version: int = 0, most: int = 1) -> Worker:
    """It holds `most` requests and a queue of one more."""
    load = {"max_running": float(most)}
    return Worker(name, WorkerKind.ROLLOUT, "x:1", job_id=job, active_version=version, load=load)


def turn(*, job: str = "job", pinned: int = -1) -> Turn:
    sampling = SamplingParams(max_tokens=8)
    return Turn("r", job, [1, 2], sampling, pinned, -1, 10.0, PrefixHolders())


class Stage:
    """Places, and who asked for one in which order."""

    def __init__(self, *workers: Worker) -> None:
        roster: Any = None
        self.stages = Stages()
        self.metrics = Metrics()
        self.clock = 0.0
        self.workers = WorkerWatch(roster=roster, kind=WorkerKind.ROLLOUT)
        self.router = RolloutRouter(
            workers=self.workers,
            stages=self.stages,
            metrics=self.metrics,
            prefix_value=16.0,
            clock=lambda: self.clock,
            rng=random.Random(0).random,
        )
        self.workers.set(list(workers))
        self.order: list[str] = []
        self.slots: dict[str, RouterSlot] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(
        self, name: str, *, wait_s: float = 600.0, avoid: frozenset[str] = frozenset(), **how: Any
    ):
        async def take() -> None:
            slot = await self.router.acquire(turn(**how), avoid=avoid, deadline=self.clock + wait_s)
            self.order.append(name)
            self.slots[name] = slot

        self.tasks[name] = asyncio.create_task(take())

    def leave(self, name: str) -> None:
        self.router.release(self.slots.pop(name))

    def gauge(self) -> float | None:
        return self.metrics.registry.get_sample_value("paceline_queued_tokens")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_when_all_are_full_turns_wait_in_order_and_are_seen_waiting() -> None:
    stage = Stage(worker("a"))
    for i in range(5):
        stage.ask(str(i))
        await settle()
    assert stage.order == ["0", "1"]
    assert stage.stages.waiting["room"] == 3
    assert stage.gauge() == stage.router.queued_tokens["job"] == 30
    stage.leave("1")
    await settle()
    assert stage.order == ["0", "1", "2"]
    for name in ("0", "2"):
        stage.leave(name)
    await settle()
    assert stage.order == list("01234")
    assert stage.stages.waiting["room"] == stage.gauge() == 0


async def test_a_turn_that_waits_too_long_fails_and_leaves_nothing() -> None:
    stage = Stage(worker("a"))
    for name in "01":
        stage.ask(name)
    stage.ask("late", wait_s=0.05)
    with pytest.raises(DeadlineError, match="no rollout worker of job job had a free slot"):
        await stage.tasks["late"]
    assert stage.router.queued_tokens["job"] == stage.stages.waiting["room"] == 0
    stage.leave("0")
    stage.ask("next")
    await settle()
    assert stage.order == ["0", "1", "next"]


async def test_capacity_for_a_cancelled_turn_goes_to_the_next() -> None:
    stage = Stage(worker("a"))
    for name in ("0", "1", "gone", "next"):
        stage.ask(name)
    await settle()
    stage.leave("0")
    stage.tasks["gone"].cancel()
    await settle()
    assert stage.order == ["0", "1", "next"]


async def test_capacity_of_a_dead_worker_is_not_reused() -> None:
    stage = Stage(worker("a"), worker("b"))
    for i in range(6):
        stage.ask(str(i))
    await settle()
    assert len(stage.order) == 4
    dead = [name for name in stage.order if stage.slots[name].candidate.worker_id == "a"]
    stage.workers.set([worker("b")])
    for name in dead:
        stage.leave(name)
    await settle()
    assert len(stage.order) == 4  # the room of a dead worker is none
    for name in sorted(set(stage.order) - set(dead)):
        stage.leave(name)
    await settle()
    assert len(stage.order) == 6
    assert {stage.slots[name].candidate.worker_id for name in stage.order[4:]} == {"b"}


async def test_the_first_worker_to_join_serves_waiting_turns() -> None:
    stage = Stage()
    stage.ask("0")
    await settle()
    assert not stage.order
    stage.workers.set([worker("a", version=-1)])
    await settle()
    assert not stage.order
    stage.workers.set([worker("a", version=0)])
    await settle()
    assert stage.order == ["0"]


async def test_an_unreachable_worker_is_retried_if_there_is_no_other() -> None:
    stage = Stage(worker("a"), worker("b"))
    for i in range(3):
        stage.ask(str(i))
    await settle()
    failed = next(s.candidate for s in stage.slots.values() if s.candidate.worker_id == "a")
    stage.router.mark_unreachable(failed)
    for i in range(3, 6):
        stage.ask(str(i))
    await settle()
    full = [s.candidate.worker_id for s in stage.slots.values()]
    assert full.count("b") == 2
    assert len(stage.order) < 6
    stage.clock = 1.0
    async with asyncio.timeout(PATIENCE_S):
        while len(stage.order) < 4:
            await asyncio.sleep(0.05)
    await settle()
    assert len(stage.order) == 4


async def test_jobs_take_turns_and_pinned_turns_go_first() -> None:
    stage = Stage(worker("a"))
    for name in ("x", "y"):
        stage.ask(name, job="a")
    await settle()
    for i in range(3):
        stage.ask(f"a{i}", job="a")
    stage.ask("b0", job="b")
    stage.ask("eval", job="b", pinned=0)
    await settle()
    for name in ("x", "y", "eval", "a0"):
        stage.leave(name)
        await settle()
    assert stage.order == ["x", "y", "eval", "a0", "b0", "a1"]


async def test_a_pinned_turn_that_waits_learns_that_its_version_is_gone() -> None:
    stage = Stage(worker("a", version=1))
    for name in "01":
        stage.ask(name)
    stage.ask("eval", pinned=1)
    await settle()
    stage.workers.set([worker("a", version=2)])
    with pytest.raises(VersionGoneError):
        await stage.tasks["eval"]
    assert stage.router.queued_tokens["job"] == 0


async def test_a_turn_for_a_version_to_come_takes_no_place() -> None:
    stage = Stage(worker("a", version=1))
    for name in "01":
        stage.ask(name)
    stage.ask("eval", pinned=2)
    await settle()
    assert stage.order == ["0", "1", "eval"]
    stage.ask("2")
    await settle()
    stage.leave("eval")
    await settle()
    assert "2" not in stage.order
    stage.leave("0")
    await settle()
    assert "2" in stage.order


Op = tuple[str, int]
ops = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "pin", "leave", "cancel", "roster"]), st.integers(0, 7)
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(ops)
def test_no_turn_waits_while_there_is_capacity_and_none_is_lost(script: list[Op]) -> None:
    asyncio.run(_play(script))


async def _play(script: list[Op]) -> None:
    stage = Stage(worker("a"), worker("b", most=2))
    now = ["a", "b"]
    for number, (what, which) in enumerate(script):
        if what in ("ask", "pin"):
            stage.ask(str(number), job=f"j{which % 3}", pinned=0 if what == "pin" else -1)
        elif what == "leave" and stage.slots:
            stage.leave(sorted(stage.slots)[which % len(stage.slots)])
        elif what == "cancel" and stage.tasks:
            stage.tasks[sorted(stage.tasks)[which % len(stage.tasks)]].cancel()
        elif what == "roster":
            now = [name for i, name in enumerate("abc") if which >> i & 1]
            stage.workers.set([worker(name, most=2 if name == "b" else 1) for name in now])
        if which % 2:
            await settle()
            _check(stage, now)
    await settle()
    _check(stage, now)
    stage.workers.set([worker("a"), worker("b", most=2)])
    await settle()
    while stage.slots:
        stage.leave(next(iter(stage.slots)))
        await settle()
    assert all(task.done() for task in stage.tasks.values())
    assert stage.router.queued_tokens.total() == stage.stages.waiting["room"] == 0


def _check(stage: Stage, now: list[str]) -> None:
    held = [slot.candidate.worker_id for slot in stage.slots.values()]
    limits = {"a": 2, "b": 3, "c": 2}
    assert all(held.count(name) <= limit for name, limit in limits.items())
    waits = [name for name, task in stage.tasks.items() if not task.done()]
    if waits:
        assert all(held.count(name) == limits[name] for name in now)
    for slot in stage.slots.values():
        assert slot.candidate.own_open == held.count(slot.candidate.worker_id)
