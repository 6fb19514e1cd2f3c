from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.environments.reasoning_gym.tasks import ReasoningGymTasks, is_heldout
from paceline.errors import InvalidError
from paceline.platform.digest import Permutation


def operands(question: str) -> tuple[str, frozenset[int]]:
    for name in "+-*":
        if name in question:
            a, b = question.rstrip("=").split(name)
            return name, frozenset({int(a), int(b)})
    raise AssertionError(question)


def pairs(tasks: ArithmeticTasks) -> set[tuple[str, frozenset[int]]]:
    return {operands(json.loads(tasks[i].payload)["question"]) for i in range(len(tasks))}


@given(st.integers(1, 300), st.integers(0, 5))
def test_a_permutation_is_a_bijection(size: int, key: int) -> None:
    permute = Permutation(size, key)
    assert sorted(permute(i) for i in range(size)) == list(range(size))


def test_answers_are_right() -> None:
    tasks = ArithmeticTasks(3, digits=2, operations=("+", "-", "*"))
    for position in range(0, len(tasks), 37):
        payload = json.loads(tasks[position].payload)
        assert eval(payload["question"].rstrip("=")) == int(payload["answer"])
        assert int(payload["answer"]) >= 0


def test_splits_are_disjoint_whatever_the_seed() -> None:
    train = pairs(ArithmeticTasks(0, operations=("+", "-")))
    heldout = pairs(ArithmeticTasks(7, split="heldout", operations=("+",)))
    assert train
    assert len(heldout) == 1010
    assert not train & heldout


def test_a_task_depends_on_seed_and_position_only() -> None:
    first, again, other = ArithmeticTasks(1), ArithmeticTasks(1), ArithmeticTasks(2)
    assert first[11] == again[11]
    assert [first[i] for i in range(20)] != [other[i] for i in range(20)]
    assert len({first[i].task_id for i in range(len(first))}) == len(first)


def test_size_limits_an_epoch() -> None:
    tasks = ArithmeticTasks(0, size=5)
    assert len(tasks) == 5
    with pytest.raises(IndexError):
        tasks[5]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"digits": 0}, "digits: 0"),
        ({"split": "test"}, "split: 'test'; allowed: train, heldout"),
        ({"operations": ("%",)}, "operations"),
        ({"heldout_share": 1.0}, "heldout_share"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidError, match=text):
        ArithmeticTasks(0, **options)  # pyright: ignore[reportArgumentType]


def test_reasoning_gym_splits_by_question() -> None:
    train = ReasoningGymTasks(0, dataset="chain_sum", max_digits=2)
    heldout = ReasoningGymTasks(0, dataset="chain_sum", max_digits=2, split="heldout", size=50)
    assert len(heldout) == 50
    assert not any(is_heldout(json.loads(train[i].payload)["question"]) for i in range(50))
    assert all(is_heldout(json.loads(heldout[i].payload)["question"]) for i in range(50))
    assert train[3] == ReasoningGymTasks(0, dataset="chain_sum", max_digits=2)[3]
    assert train[3].task_id != train[4].task_id


def test_an_unknown_data_set_is_named() -> None:
    with pytest.raises(InvalidError, match="'nope'"):
        ReasoningGymTasks(0, dataset="nope")


def test_an_unknown_option_of_a_data_set_is_named() -> None:
    with pytest.raises(InvalidError, match="flavour"):
        ReasoningGymTasks(0, dataset="chain_sum", flavour=3)
