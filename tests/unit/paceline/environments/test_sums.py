"""Mixtures of easy and hard sums, wrong labels, and chains of sums."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from paceline.config.options import wrong_options
from paceline.environments.arithmetic.levels import carries
from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.environments.chain.tasks import ChainTasks
from paceline.environments.chain.world import Chain
from paceline.errors import InvalidError
from paceline.plugins import TaskSource

MIXTURE: dict[str | int, float] = {"2-plain": 0.3, "2-carry": 0.4, 3: 0.3}


def payloads(tasks: TaskSource) -> list[dict[str, Any]]:
    return [json.loads(tasks[position].payload) for position in range(len(tasks))]


def pair(question: str) -> frozenset[int]:
    return frozenset(map(int, question.rstrip("=").split("+")))


@pytest.mark.parametrize(
    ("a", "b", "operation", "expected"),
    [
        (12, 34, "+", False),
        (17, 25, "+", True),
        (95, 5, "+", True),
        (905, 95, "+", True),
        (99, 0, "+", False),
        (52, 17, "-", True),
        (57, 12, "-", False),
        (100, 1, "-", True),
    ],
)
def test_which_sums_carry(a: int, b: int, operation: str, expected: bool) -> None:
    assert carries(a, b, operation) is expected


def test_a_mixture_has_its_shares_of_levels() -> None:
    tasks = ArithmeticTasks(0, mixture=MIXTURE, size=1000)
    seen = Counter(tasks[position].domain for position in range(1000))
    assert seen == {
        "arithmetic+/2-plain": 300,
        "arithmetic+/2-carry": 400,
        "arithmetic+/3": 300,
    }
    for position in range(1000):
        task = tasks[position]
        payload = json.loads(task.payload)
        a, b = map(int, payload["question"].rstrip("=").split("+"))
        assert a + b == int(payload["answer"])
        level = task.domain.rpartition("/")[2]
        assert len(str(max(a, b))) == int(level[0])
        if level != "3":
            assert carries(a, b, "+") == (level == "2-carry")
    # The first tasks are a sample of all: evaluations take those.
    assert 20 < sum(tasks[i].domain.endswith("plain") for i in range(100)) < 40


def test_no_held_out_sum_is_in_a_mixture_that_is_trained_on() -> None:
    share: dict[str | int, float] = {1: 0.2, 2: 0.8}
    train = {pair(p["question"]) for p in payloads(ArithmeticTasks(0, mixture=share))}
    heldout = ArithmeticTasks(1, split="heldout", mixture=share, size=500)
    assert not train & {pair(p["question"]) for p in payloads(heldout)}
    # The held-out sums are those of the same digits without a mixture, too.
    alone = {pair(p["question"]) for p in payloads(ArithmeticTasks(2, split="heldout"))}
    assert not {each for each in train if max(each) > 9} & alone


def test_a_mixture_depends_on_seed_and_position_only() -> None:
    first, again, other = (ArithmeticTasks(seed, mixture=MIXTURE, size=50) for seed in (1, 1, 2))
    assert payloads(first) == payloads(again) != payloads(other)
    assert len(ArithmeticTasks(0, mixture=MIXTURE)) == 10_000


@pytest.mark.parametrize("options", [{}, {"digits": 1, "operations": ["+", "-", "*"]}])
def test_wrong_labels_are_a_share_of_the_training_tasks(options: dict[str, Any]) -> None:
    def wrong(**more: Any) -> tuple[set[str], int]:
        tasks = ArithmeticTasks(**options, **more)
        found = payloads(tasks)
        assert all(int(each["answer"]) >= 0 for each in found)
        assert {*found[0]} == {"question", "answer"}
        assert {tasks[i].domain for i in range(9)} <= {"arithmetic+", "arithmetic-", "arithmetic*"}
        bad = [p for p in found if int(p["answer"]) != eval(p["question"].rstrip("="))]
        return {json.dumps([sorted(p["question"]), p["answer"]]) for p in bad}, len(bad)

    size = len(ArithmeticTasks(**options))
    same, count = wrong(seed=0, wrong_labels=0.2)
    assert count == pytest.approx(0.2 * size, abs=2)
    assert wrong(seed=5, wrong_labels=0.2) == (same, count)
    assert wrong(seed=0, split="heldout", wrong_labels=0.2)[1] == 0
    assert wrong(seed=0)[1] == 0


def test_labels_of_a_mixture_may_be_wrong() -> None:
    tasks = ArithmeticTasks(0, mixture=MIXTURE, size=2000, wrong_labels=0.25)
    bad = sum(
        sum(map(int, p["question"][:-1].split("+"))) != int(p["answer"]) for p in payloads(tasks)
    )
    assert 400 < bad < 600


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mixture": {"2-hard": 1.0}}, "mixture: '2-hard'; allowed: a number of digits, 1 to 9"),
        ({"mixture": {"10": 1.0}}, "mixture: '10'; allowed"),
        ({"mixture": {1: 0.5, 2: 0.4}}, r"mixture: shares \[0.5, 0.4\]; .* together 1"),
        ({"mixture": {1: 1.5, 2: -0.5}}, "mixture: shares .*above 0"),
        ({"mixture": {}}, "mixture: shares"),
        ({"mixture": {"2-plain": 1.0}, "operations": ["*"]}, "mixture: '2-plain' with products"),
        (
            {"mixture": {"1-carry": 1.0}, "heldout_share": 0.99},
            "mixture: '1-carry': none of the split's tasks",
        ),
        ({"wrong_labels": 1.0}, "wrong_labels: 1.0; allowed: 0 to below 1"),
    ],
)
def test_wrong_mixtures_are_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidError, match=rf"tasks\.options\.{told}"):
        ArithmeticTasks(0, **options)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("arithmetic", {"mixture": {"2": "half"}}, "o.mixture.2: "),
        ("arithmetic", {"wrong_labels": "many"}, "o.wrong_labels: "),
        ("chain", {"length": 0}, "o.length: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_options_are_refused_at_submit(name: str, options: dict[str, Any], told: str) -> None:
    (line,) = wrong_options("o", "environments", name, options)
    assert line.startswith(told)


async def test_a_chain_is_worth_something_only_if_all_sums_are_right() -> None:
    task = ChainTasks(0, length=3)[0]
    assert task.domain == "chain/3"
    payload = json.loads(task.payload)
    world = Chain(length=3)
    shown = await world.reset(task, 0)
    assert shown.text == shown.messages[0].content == payload["questions"][0]
    results = [await world.step(f" {answer}\n") for answer in payload["answers"]]
    assert [(result.reward, result.done) for result in results] == [
        (0.0, False),
        (0.0, False),
        (1.0, True),
    ]
    assert [result.observation.text for result in results[:2]] == [
        f"\n{question}" for question in payload["questions"][1:]
    ]
    await world.reset(task, 0)
    await world.step(payload["answers"][0])
    wrong = await world.step(payload["answers"][1] + "0")
    assert (wrong.reward, wrong.done) == (0.0, True)


def test_held_out_chains_have_held_out_sums_only() -> None:
    train, heldout = ChainTasks(0, length=4), ChainTasks(1, length=2, split="heldout")
    asked = [{pair(q) for p in payloads(t) for q in p["questions"]} for t in (train, heldout)]
    assert len(train) == 4040 // 4
    assert len(heldout) == 1010 // 2
    assert not asked[0] & asked[1]
    with pytest.raises(InvalidError, match=r"options\.length: 64; the split has 44 sums"):
        ChainTasks(0, length=64, digits=1)
