"""Turns that wait for room on a rollout worker."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DeadlineError, VersionGoneError
from paceline.metrics import Metrics
from paceline.types import Sampling, Worker, WorkerKind
from paceline_environment.places import Places, Seat
from paceline_environment.roster import Workers
from paceline_environment.stages import Stages
from paceline_environment.turn import Home, Turn


def worker(name: str, *, job: str = "", version: int = 0, most: int = 1) -> Worker:
    """It holds `most` requests and a queue of one more."""
    load = {"max_running": float(most)}
    return Worker(name, WorkerKind.ROLLOUT, "x:1", job_id=job, active_version=version, load=load)


def turn(*, job: str = "job", pinned: int = -1) -> Turn:
    sampling = Sampling(max_tokens=8)
    return Turn("r", job, [1, 2], sampling, pinned, -1, 10.0, Home())


class Desk:
    """Places, and who asked for one in which order."""

    def __init__(self, *workers: Worker) -> None:
        roster: Any = None
        self.stages = Stages()
        self.metrics = Metrics()
        self.clock = 0.0
        self.workers = Workers(roster=roster, kind=WorkerKind.ROLLOUT)
        self.places = Places(
            workers=self.workers,
            stages=self.stages,
            metrics=self.metrics,
            worth=16.0,
            clock=lambda: self.clock,
            chance=random.Random(0).random,
        )
        self.workers.set(list(workers))
        self.order: list[str] = []
        self.seats: dict[str, Seat] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(
        self, name: str, *, wait_s: float = 600.0, avoid: frozenset[str] = frozenset(), **how: Any
    ):
        async def take() -> None:
            seat = await self.places.take(turn(**how), avoid=avoid, deadline=self.clock + wait_s)
            self.order.append(name)
            self.seats[name] = seat

        self.tasks[name] = asyncio.create_task(take())

    def leave(self, name: str) -> None:
        self.places.leave(self.seats.pop(name))

    def gauge(self) -> float | None:
        return self.metrics.registry.get_sample_value("paceline_queued_tokens")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_when_all_are_full_turns_wait_in_order_and_are_seen_waiting() -> None:
    desk = Desk(worker("a"))
    for i in range(5):
        desk.ask(str(i))
        await settle()
    assert desk.order == ["0", "1"]
    assert desk.stages.waiting["room"] == 3
    assert desk.gauge() == desk.places.queued_tokens["job"] == 30
    desk.leave("1")
    await settle()
    assert desk.order == ["0", "1", "2"]
    for name in ("0", "2"):
        desk.leave(name)
    await settle()
    assert desk.order == list("01234")
    assert desk.stages.waiting["room"] == desk.gauge() == 0


async def test_who_waits_too_long_is_told_and_leaves_no_trace() -> None:
    desk = Desk(worker("a"))
    for name in "01":
        desk.ask(name)
    desk.ask("late", wait_s=0.05)
    with pytest.raises(DeadlineError, match="no rollout worker of job job had room"):
        await desk.tasks["late"]
    assert desk.places.queued_tokens["job"] == desk.stages.waiting["room"] == 0
    desk.leave("0")
    desk.ask("next")
    await settle()
    assert desk.order == ["0", "1", "next"]


async def test_room_found_for_one_who_has_just_gone_is_given_to_the_next() -> None:
    desk = Desk(worker("a"))
    for name in ("0", "1", "gone", "next"):
        desk.ask(name)
    await settle()
    desk.leave("0")
    desk.tasks["gone"].cancel()
    await settle()
    assert desk.order == ["0", "1", "next"]


async def test_a_worker_that_dies_takes_nobody_along() -> None:
    desk = Desk(worker("a"), worker("b"))
    for i in range(6):
        desk.ask(str(i))
    await settle()
    assert len(desk.order) == 4
    dead = [name for name in desk.order if desk.seats[name].place.worker_id == "a"]
    desk.workers.set([worker("b")])
    for name in dead:
        desk.leave(name)
    await settle()
    assert len(desk.order) == 4  # the room of a dead worker is none
    for name in sorted(set(desk.order) - set(dead)):
        desk.leave(name)
    await settle()
    assert len(desk.order) == 6
    assert {desk.seats[name].place.worker_id for name in desk.order[4:]} == {"b"}


async def test_the_first_worker_to_join_serves_those_who_wait() -> None:
    desk = Desk()
    desk.ask("0")
    await settle()
    assert not desk.order
    desk.workers.set([worker("a", version=-1)])
    await settle()
    assert not desk.order
    desk.workers.set([worker("a", version=0)])
    await settle()
    assert desk.order == ["0"]


async def test_a_worker_out_of_reach_is_tried_again_when_there_is_no_other() -> None:
    desk = Desk(worker("a"), worker("b"))
    for i in range(3):
        desk.ask(str(i))
    await settle()
    failed = next(s.place for s in desk.seats.values() if s.place.worker_id == "a")
    desk.places.shun(failed)
    for i in range(3, 6):
        desk.ask(str(i))
    await settle()
    full = [s.place.worker_id for s in desk.seats.values()]
    assert full.count("b") == 2
    assert len(desk.order) < 6
    desk.clock = 1.0
    async with asyncio.timeout(60):
        while len(desk.order) < 4:
            await asyncio.sleep(0.05)
    await settle()
    assert len(desk.order) == 4


async def test_jobs_take_turns_and_pinned_turns_go_first() -> None:
    desk = Desk(worker("a"))
    for name in ("x", "y"):
        desk.ask(name, job="a")
    await settle()
    for i in range(3):
        desk.ask(f"a{i}", job="a")
    desk.ask("b0", job="b")
    desk.ask("eval", job="b", pinned=0)
    await settle()
    for name in ("x", "y", "eval", "a0"):
        desk.leave(name)
        await settle()
    assert desk.order == ["x", "y", "eval", "a0", "b0", "a1"]


async def test_a_pinned_turn_that_waits_learns_that_its_version_is_gone() -> None:
    desk = Desk(worker("a", version=1))
    for name in "01":
        desk.ask(name)
    desk.ask("eval", pinned=1)
    await settle()
    desk.workers.set([worker("a", version=2)])
    with pytest.raises(VersionGoneError):
        await desk.tasks["eval"]
    assert desk.places.queued_tokens["job"] == 0


async def test_a_turn_for_a_version_to_come_takes_no_place() -> None:
    desk = Desk(worker("a", version=1))
    for name in "01":
        desk.ask(name)
    desk.ask("eval", pinned=2)
    await settle()
    assert desk.order == ["0", "1", "eval"]
    desk.ask("2")
    await settle()
    desk.leave("eval")
    await settle()
    assert "2" not in desk.order
    desk.leave("0")
    await settle()
    assert "2" in desk.order


Op = tuple[str, int]
ops = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "pin", "leave", "cancel", "roster"]), st.integers(0, 7)
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(ops)
def test_nobody_waits_beside_room_and_no_room_is_lost(script: list[Op]) -> None:
    asyncio.run(_play(script))


async def _play(script: list[Op]) -> None:
    desk = Desk(worker("a"), worker("b", most=2))
    now = ["a", "b"]
    for number, (what, which) in enumerate(script):
        if what in ("ask", "pin"):
            desk.ask(str(number), job=f"j{which % 3}", pinned=0 if what == "pin" else -1)
        elif what == "leave" and desk.seats:
            desk.leave(sorted(desk.seats)[which % len(desk.seats)])
        elif what == "cancel" and desk.tasks:
            desk.tasks[sorted(desk.tasks)[which % len(desk.tasks)]].cancel()
        elif what == "roster":
            now = [name for i, name in enumerate("abc") if which >> i & 1]
            desk.workers.set([worker(name, most=2 if name == "b" else 1) for name in now])
        if which % 2:
            await settle()
            _check(desk, now)
    await settle()
    _check(desk, now)
    desk.workers.set([worker("a"), worker("b", most=2)])
    await settle()
    while desk.seats:
        desk.leave(next(iter(desk.seats)))
        await settle()
    assert all(task.done() for task in desk.tasks.values())
    assert desk.places.queued_tokens.total() == desk.stages.waiting["room"] == 0


def _check(desk: Desk, now: list[str]) -> None:
    held = [seat.place.worker_id for seat in desk.seats.values()]
    limits = {"a": 2, "b": 3, "c": 2}
    assert all(held.count(name) <= limit for name, limit in limits.items())
    waits = [name for name, task in desk.tasks.items() if not task.done()]
    if waits:
        assert all(held.count(name) == limits[name] for name in now)
    for seat in desk.seats.values():
        assert seat.place.own_open == held.count(seat.place.worker_id)
