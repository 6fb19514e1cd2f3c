"""Picking a rollout worker: what holds for any workers, loads and chances."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.enums import WorkerKind
from paceline.errors import VersionGoneError
from paceline.types import Worker
from paceline_environment.rollouts.picking import FairWaitQueue, RolloutCandidate, eligible, pick


def worker(name: str, load: dict[str, float] | None = None, *, version: int = 0) -> Worker:
    return Worker(name, WorkerKind.ROLLOUT, "x:1", active_version=version, load=load or {})


def place(name: str, *, version: int = 0, **known: Any) -> RolloutCandidate:
    return RolloutCandidate(worker(name, version=version), **known)


counts = st.integers(0, 40)


@st.composite
def several_places(draw: st.DrawFn) -> list[RolloutCandidate]:
    """One to eight of them in any state."""
    tokens = st.integers(0, 10_000)
    return [
        place(
            f"w{i}",
            version=draw(st.integers(-1, 3)),
            own_open=draw(counts),
            own_tokens=draw(tokens),
            others_open=draw(counts),
            others_tokens=draw(tokens),
            capacity=draw(st.sampled_from([0, 1, 8, 32])),
            callers=draw(st.integers(1, 5)),
        )
        for i in range(draw(st.integers(1, 8)))
    ]


several = several_places()


@given(
    several,
    st.integers(-1, 3),
    st.integers(-1, 3),
    st.sets(st.sampled_from([f"w{i}" for i in range(8)])),
)
def test_eligible_serves_the_version_and_prefers_those_that_did_not_fail(
    found: list[RolloutCandidate], pinned: int, least: int, avoid: set[str]
) -> None:
    serving = [p for p in found if p.version >= 0]
    if pinned >= 0 and serving and all(p.version > pinned for p in serving):
        with pytest.raises(VersionGoneError):
            eligible(found, pinned=pinned, min_version=least, avoid=avoid, now=0.0)
        return
    chosen = eligible(found, pinned=pinned, min_version=least, avoid=avoid, now=0.0)
    exact = [p for p in serving if p.version == pinned]
    new = [p for p in serving if p.version >= least]
    allowed = new if pinned < 0 else exact or [p for p in serving if p.version < pinned]
    fresh = [p for p in allowed if p.worker_id not in avoid]
    assert chosen == (fresh or allowed)


def test_a_worker_that_failed_is_left_alone_for_a_while() -> None:
    found = [place("a"), place("b")]
    found[0].backoff_until = 5.0
    assert eligible(found, pinned=-1, min_version=-1, avoid=(), now=4.9) == found[1:]
    assert eligible(found, pinned=-1, min_version=-1, avoid=(), now=5.0) == found
    found[1].backoff_until = 5.0
    assert eligible(found, pinned=-1, min_version=-1, avoid=(), now=4.9) == found


@given(
    several,
    st.dictionaries(st.sampled_from([f"w{i}" for i in range(8)]), st.integers(0, 500)),
    st.floats(0, 50),
    st.randoms(use_true_random=False),
)
def test_picks_a_worker_with_capacity_and_not_costlier_than_a_holder(
    found: list[RolloutCandidate], held: dict[str, int], worth: float, chance: random.Random
) -> None:
    chosen = pick(found, pinned=-1, held=held, prefix_value=worth, rng=chance.random)
    free = [p for p in found if p.has_slot]
    assert (chosen is None) == (not free)
    if chosen is None:
        return
    assert chosen in free
    largest = max(p.capacity for p in free) or 1

    def cost(p: RolloutCandidate) -> float:
        return p.tokens * largest / (p.capacity or largest) - worth * held.get(p.worker_id, 0)

    assert all(cost(chosen) <= cost(p) for p in free if p.worker_id in held)
    if len(free) > 1 and chosen.worker_id not in held:
        assert any(cost(chosen) <= cost(p) for p in free if p is not chosen)


@given(st.integers(2, 9), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_the_two_are_different(num: int, first: float, second: float) -> None:
    """So the worker with the most tokens in flight is never picked."""
    found = [place(f"w{i}", own_tokens=i) for i in range(num)]
    chances = iter([first, second])
    chosen = pick(found, pinned=-1, held={}, prefix_value=0, rng=lambda: next(chances))
    assert chosen is not found[-1]


def test_a_holder_is_skipped_when_its_load_outweighs_its_prefix() -> None:
    def chosen(extra: int) -> str:
        found = [place("home", own_tokens=100 + extra), place("other", own_tokens=100)]
        picked = pick(found, pinned=-1, held={"home": 10}, prefix_value=16, rng=random.random)
        assert picked is not None
        return picked.worker_id

    assert {chosen(159) for _ in range(20)} == {"home"}
    assert {chosen(161) for _ in range(20)} == {"other"}


def test_larger_workers_get_more() -> None:
    """In the long run as much as their capacities say."""
    chance = random.Random(1)
    found = [place("big", capacity=3000), place("small", capacity=1000)]
    for _ in range(4000):
        chosen = pick(found, pinned=-1, held={}, prefix_value=0, rng=chance.random)
        assert chosen is not None
        chosen.own_open += 1
        chosen.own_tokens += 100
    assert found[0].own_open == pytest.approx(3000, abs=100)


def test_callers_with_the_same_old_report_do_not_herd() -> None:
    """Twenty callers see one idle worker among ten; it gets a fair part of them, not all."""
    chance = random.Random(2)
    got: Counter[str] = Counter()
    for _ in range(2000):
        found = [place(f"w{i}", others_tokens=1000) for i in range(9)] + [place("idle")]
        chosen = pick(found, pinned=-1, held={}, prefix_value=0, rng=chance.random)
        assert chosen is not None
        got[chosen.worker_id] += 1
    assert got["idle"] / 2000 == pytest.approx(0.2, abs=0.03)  # 2 of 10 are drawn


def test_a_turn_for_a_future_version_needs_no_capacity() -> None:
    full = place("a", version=3, own_open=9, capacity=8)
    assert pick([full], pinned=3, held={}, prefix_value=0, rng=random.random) is None
    assert pick([full], pinned=4, held={}, prefix_value=0, rng=random.random) is full


def test_reports_include_the_load_of_others() -> None:
    one = place("a", own_open=3, own_tokens=30)
    report = {"max_running": 16.0, "open": 5.0, "open_tokens": 70.0, "callers": 2.0}
    one.update(worker("a", report))
    assert (one.others_open, one.others_tokens, one.callers, one.tokens) == (2, 40, 2, 70)
    one.own_open, one.own_tokens = 0, 0
    one.update(worker("a", dict(report), version=4))
    assert (one.others_open, one.version) == (2, 4)  # the same report again says nothing new
    one.update(worker("a", {**report, "open": 6.0}))
    assert (one.others_open, one.callers) == (6, 3)  # this caller is not among those that it counts


def test_room_is_capacity_plus_a_short_queue_and_at_least_a_share() -> None:
    one = place("a", capacity=16, callers=3)
    assert one.limit == 18
    one.own_open, one.others_open = 7, 10
    assert one.has_slot
    one.others_open = 30
    assert not one.has_slot  # 7 of 18 are more than a third
    one.own_open = 5
    assert one.has_slot
    crowded = place("b", capacity=2, callers=9, others_open=9)
    assert crowded.has_slot  # one place, however many want some
    crowded.own_open = 1
    assert not crowded.has_slot
    assert place("c", own_open=10_000).has_slot  # a worker that does not say what it can hold


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.sampled_from([1, 4, 16]), st.integers(0, 1 << 30))
def test_callers_with_much_to_do_share_a_worker(num: int, capacity: int, seed: int) -> None:
    """Though all but the first come when it is full, and reports come rarely."""
    chance = random.Random(seed)
    callers = [place("w") for _ in range(num)]
    for step in range(num * capacity * 40):
        if step % 25 == 0:  # the worker's report
            open_ = sum(one.own_open for one in callers)
            load: dict[str, float] = {
                "max_running": capacity,
                "open": open_,
                "callers": sum(one.own_open > 0 for one in callers),
                "beat": step,
            }
            for one in callers:
                one.update(worker("w", load))
        active = callers if step > 50 else callers[:1]
        for one in chance.sample(active, len(active)):
            while one.has_slot:
                one.own_open += 1
        busy = [one for one in callers if one.own_open]
        chance.choices(busy, [one.own_open for one in busy])[0].own_open -= 1
    share = max(callers[0].limit // num, 1)
    assert all(one.own_open >= share - 1 for one in callers)
    assert sum(one.own_open for one in callers) <= 2 * callers[0].limit + num


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=40),
    st.lists(st.integers(0, 4), max_size=60),
)
def test_a_queue_serves_all_once_in_order_and_round_robin(
    arrivals: list[tuple[int, int]], rooms: list[int]
) -> None:
    line: FairWaitQueue[tuple[int, int]] = FairWaitQueue()
    items = [(queue, number) for number, (queue, _) in enumerate(arrivals)]
    for item in items:
        line.add(item[0], item)
    served: list[tuple[int, int]] = []
    for room in [*rooms, len(items)]:
        left = [room]

        def offer(item: tuple[int, int], left: list[int] = left) -> bool:
            if left[0]:
                left[0] -= 1
                served.append(item)
                return True
            return False

        line.serve(offer)
    assert sorted(served) == sorted(items)
    for queue in range(4):
        mine = [item for item in served if item[0] == queue]
        assert mine == [item for item in items if item[0] == queue]
    # While a queue waits, no other is served twice more often than it.
    for queue in {item[0] for item in items}:
        waits = max(i for i, item in enumerate(served) if item[0] == queue)
        seen = Counter(item[0] for item in served[:waits])
        assert all(seen[other] <= seen[queue] + 1 for other in seen)


def test_a_refused_queue_does_not_hold_up_others() -> None:
    line: FairWaitQueue[str] = FairWaitQueue()
    for name in ("a1", "a2", "b1", "b2"):
        line.add(name[0], name)
    line.remove("b", "b1")
    line.remove("b", "b1")
    served: list[str] = []

    def offer(item: str) -> bool:
        if item[0] == "b":
            served.append(item)
        return item[0] == "b"

    line.serve(offer)
    assert served == ["b2"]
