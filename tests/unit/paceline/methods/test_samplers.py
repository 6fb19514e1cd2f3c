"""Samplers of methods: what they learn, with the numbers of their papers, and what they draw."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import InvalidError
from paceline.generation.samplers.staged import Staged
from paceline.methods.dart.sampler import DartOrder
from paceline.methods.difficulty_pools.sampler import DifficultyPools
from paceline.methods.vade.sampler import Vade
from paceline.plugins import Context, GroupOutcome, Pick, Sampler

SIZE, GROUP, BATCH = 400, 8, 16
Rate = Callable[[int], float]  # success rate by task


def outcome(task: int, solved: float, of: int = GROUP, **more: Any) -> GroupOutcome:
    rewards = tuple(float(index < solved) for index in range(of))
    return GroupOutcome(task, rewards, ("",) * of, **more)


def trained(sampler: Any, rate: Rate, *, steps: int) -> list[int]:
    """Tasks of the second half of a job in which tasks succeed at these rates."""
    chance, memory, drawn = random.Random(0), dict[str, Any](), list[int]()
    sampler.remember(memory)
    for step in range(steps):
        outcomes: list[GroupOutcome] = []
        for _ in range(BATCH):
            found = sampler.next()
            pick = found if isinstance(found, Pick) else Pick(found)
            solved = sum(chance.random() < rate(pick.task) for _ in range(GROUP))
            outcomes.append(outcome(pick.task, solved, meta=pick.meta))
            drawn.append(pick.task)
        context = Context(step, steps, memory=memory, outcomes=outcomes)
        memory = {**memory, **sampler.observe(outcomes, context)}
        sampler.remember(memory)
    return drawn[len(drawn) // 2 :]


def halves(task: int) -> float:
    """A quarter of the tasks are easy, a quarter hopeless, and half in between."""
    return {0: 1.0, 1: 0.0}.get(task % 4, 0.4)


def share_between(drawn: list[int]) -> float:
    return sum(task % 4 > 1 for task in drawn) / len(drawn)


def test_vade_posterior_numbers() -> None:
    vade = Vade(10)
    alpha, beta, step = vade.learned((3.0, 5.0, 4), outcome(0, 2), 5)
    assert (alpha, beta, step) == pytest.approx((4.8, 10.6, 5))
    assert alpha / (alpha + beta) == pytest.approx(0.3117, abs=1e-4)
    assert vade.posterior((3.0, 5.0, 4), 5) == pytest.approx((2.98, 4.96))
    assert vade.posterior(None, 5) == (1.0, 1.0)
    # A rewound trainer has gone back; evidence does not grow by that.
    assert vade.posterior((3.0, 5.0, 4), 2) == (3.0, 5.0)


@pytest.mark.parametrize(
    ("rate", "expected"), [(0.5, 0.125), (1 / 3, 0.1481), (0.75, 0.0469), (0.1, 0.081)]
)
def test_vade_gain_numbers(rate: float, expected: float) -> None:
    assert Vade(10).gain(rate) == pytest.approx(expected, abs=1e-4)
    assert Vade(10, gain="variance").gain(rate) == pytest.approx(rate * (1 - rate))


def test_vade_counts_fractional_rewards_within_bounds() -> None:
    found = Vade(10).learned(None, GroupOutcome(0, (0.5, 3.0, -1.0, 0.25), ("",) * 4), 0)
    assert found == pytest.approx((1.0 + 1.75, 1.0 + 2.25, 0))


def test_vade_draws_what_is_worth_it_and_forgets_nothing_for_ever() -> None:
    drawn = trained(Vade(SIZE, seed=1), halves, steps=60)
    assert share_between(drawn) > 0.7
    shuffled = trained(Vade(SIZE, seed=1, uniform=1.0), halves, steps=60)
    assert 0.35 < share_between(shuffled) < 0.65
    assert {task % 4 for task in drawn} == {0, 1, 2, 3}


def test_no_task_twice_in_a_pass() -> None:
    drawn = trained(Vade(SIZE, window=4), halves, steps=12)
    sampler = Vade(SIZE, window=4)
    sampler.remember({})
    a_pass = [sampler.next() for _ in range(SIZE // 4)]
    assert max(Counter(a_pass).values()) == 1
    assert max(Counter(drawn).values()) <= 2


@pytest.mark.parametrize("make", [Vade, DartOrder, DifficultyPools])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_few_tasks(make: Callable[..., Sampler], size: int) -> None:
    sampler: Any = make(size, epochs=4)
    sampler.remember({})
    drawn = [sampler.next() for _ in range(4 * size)]
    assert all(0 <= task < size for task in drawn)
    assert sampler.next() is None
    with pytest.raises(InvalidError, match="tasks"):
        make(0)


def test_dart_order_tries_all_and_then_the_weakest() -> None:
    order = DartOrder(SIZE, window=8, last=8)
    memory: dict[str, Any] = {str(task): [1.0, 0.0] for task in range(SIZE)}
    del memory["77"]
    order.remember(memory)
    passes = [order.next() for _ in range(SIZE // 8)]
    assert 77 in passes
    memory |= {str(task): [0.0] * 8 for task in range(0, SIZE, 4)}
    memory["77"] = [1.0]
    order.remember(memory)
    assert sum(task % 4 == 0 for task in (order.next() for _ in range(50)) if task) > 35


def test_dart_keeps_the_newest_episodes() -> None:
    assert DartOrder(5, last=8).learned([1.0] * 6, outcome(0, 0, 4), 3) == [1.0] * 4 + [0.0] * 4


def test_failed_groups_teach_nothing() -> None:
    failed = GroupOutcome(3, (), (), failed="group_failed")
    for sampler in (Vade(5), DartOrder(5), DifficultyPools(5)):
        assert sampler.observe([failed], Context(7, 10)) == {"step": 7}


def test_pools_have_their_shares() -> None:
    pools = DifficultyPools(SIZE, window=16, easy_fraction=0.2, hard_fraction=0.1)
    memory = {str(task): halves(task) for task in range(SIZE)}
    pools.remember(memory)
    drawn = Counter(halves(task) for _ in range(2000) if (task := pools.next()) is not None)
    assert drawn[1.0] / 2000 == pytest.approx(0.2, abs=0.04)
    assert drawn[0.0] / 2000 == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize(
    "options",
    [
        {"easy_fraction": 0.6, "hard_fraction": 0.6},
        {"easy_threshold": 0.2, "hard_threshold": 0.4},
    ],
)
def test_pools_refuse(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match=r"experience\.sampler"):
        DifficultyPools(5, **options)


def staged(**more: Any) -> Staged:
    stages = [{"share": 0.25, "reward": 0.7}, {"share": 0.5, "steps": 10}, {"share": 1.0}]
    return Staged(SIZE, stages=stages, groups=20, **more)  # pyright: ignore[reportArgumentType]


def test_stages_follow_each_other_by_reward_and_by_steps() -> None:
    sampler, tasks = staged(), list[int]()
    memory: dict[str, Any] = {}
    sampler.remember(memory)
    begun: dict[int, int] = {}
    for step in range(30):
        outcomes: list[GroupOutcome] = []
        for _ in range(BATCH):
            pick = sampler.next()
            assert pick is not None
            begun.setdefault(pick.meta["stage"], step)
            tasks.append(pick.task)
            assert pick.task < SIZE * (0.25, 0.5, 1.0)[pick.meta["stage"]]
            outcomes.append(outcome(pick.task, 4 + step, meta=pick.meta))
        context = Context(step, 30, memory=memory, outcomes=outcomes)
        memory = {**memory, **sampler.observe(outcomes, context)}
        sampler.remember(memory)
    # 20 groups with a mean of 0.7 are known after step 3: means are 0.625, 0.75, ...
    assert begun == {0: 0, 1: 3, 2: 13}


def test_groups_of_an_earlier_stage_do_not_count() -> None:
    late = [outcome(0, 8, meta={"stage": 0}) for _ in range(50)]
    memory = {"stage": 1, "since": 5, "recent": [0.1]}
    found = staged().observe(late, Context(6, 30, memory=memory, outcomes=late))
    assert found == {"stage": 1, "since": 5, "recent": [0.1]}


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([{"share": 0.5}, {"share": 1.0}], "never ends"),
        ([{"share": 0.5, "steps": 3}, {"share": 0.5}], "must be larger"),
        ([{"share": 1.5}], "share"),
        ([], "stages"),
    ],
)
def test_stages_refuse(stages: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(InvalidError, match=problem):
        Staged(SIZE, stages=stages)  # pyright: ignore[reportArgumentType]
