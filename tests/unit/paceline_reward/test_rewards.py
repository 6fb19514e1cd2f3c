from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import ScoreStatus
from paceline.environments.dataset.world import Dataset
from paceline.errors import InvalidError
from paceline.platform.text import as_text
from paceline.plugins import RewardInput, RewardTurn
from paceline.rewards.answers import number
from paceline.rewards.environment import environment
from paceline.rewards.exact import exact
from paceline.rewards.overlong import overlong
from paceline.rewards.python import python
from paceline.rewards.regex import regex
from paceline.types import Task

MakeItem = Callable[..., RewardInput]


@pytest.mark.parametrize(
    ("response", "answer", "options", "reward"),
    [
        ("42", "42", {}, 1.0),
        (" 42\n", 42, {}, 1.0),
        (" 42", "42", {"strip": False}, 0.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"casefold": True}, 1.0),
        ("1,250.0", 1250, {"numeric": True}, 1.0),
        ("43", 42, {"numeric": True}, 0.0),
    ],
)
def test_exact(
    item: MakeItem, response: str, answer: Any, options: dict[str, Any], reward: float
) -> None:
    score = exact(item(response, answer=answer), **options)
    assert (score.reward, score.status) == (reward, ScoreStatus.OK)
    assert score.raw_answer == response


def test_a_row_without_an_answer_has_no_score(item: MakeItem) -> None:
    """Whoever calls it makes an infrastructure error of that."""
    with pytest.raises(InvalidError, match=r"'answer' of task .* is null; it has no answer"):
        exact(item("null", answer=None))


def test_exact_numeric_without_a_number_is_a_parse_error(item: MakeItem) -> None:
    score = exact(item("a lot"), numeric=True)
    assert (score.reward, score.status) == (0.0, ScoreStatus.PARSE_ERROR)


@pytest.mark.parametrize("answer", ["four", "5 %", "\u00bd", "nan", ""])
def test_exact_numeric_refuses_an_answer_that_no_response_can_equal(
    item: MakeItem, answer: str
) -> None:
    with pytest.raises(InvalidError, match="is no number"):
        exact(item("4", answer=answer), numeric=True)


def test_exact_names_the_missing_field(item: MakeItem) -> None:
    with pytest.raises(InvalidError, match="has no field 'result'"):
        exact(item("42"), answer_field="result")


@pytest.mark.parametrize("answer", [True, False, 2, "yes", 2.5, [1, "a"]])
async def test_exact_and_the_world_of_rows_want_the_same_text(item: MakeItem, answer: Any) -> None:
    payload = json.dumps({"question": "q", "answer": answer})
    for text in (str(answer), json.dumps(answer), f" {as_text(answer)}\n"):
        world = Dataset()
        await world.reset(Task(task_id="t", environment="dataset", payload=payload), 0)
        assert (await world.step(text)).reward == exact(item(text, answer=answer)).reward


def test_a_missing_answer_is_no_text(item: MakeItem) -> None:
    with pytest.raises(InvalidError, match="is null; it has no answer"):
        exact(item("null", answer=None))


@given(st.integers(), st.integers(0, 5))
def test_number_ignores_zeros_and_separators(value: int, zeros: int) -> None:
    assert number(f" {value:,}.{'0' * zeros} ") == str(value)


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1e9999999", "--1"])
def test_number_refuses(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "plain"), [("-0.0", "0"), ("+3", "3"), ("1e3", "1000"), ("0.50", "0.5")]
)
def test_number(text: str, plain: str) -> None:
    assert number(text) == plain


def test_regex_compares_its_group(item: MakeItem) -> None:
    pattern = r"answer is (?P<answer>\d+)"
    assert regex(item("the answer is 42."), pattern=pattern).reward == 1.0
    wrong = regex(item("the answer is 41."), pattern=pattern)
    assert (wrong.reward, wrong.status, wrong.raw_answer) == (0.0, ScoreStatus.OK, "41")


def test_regex_without_group_rewards_the_match(item: MakeItem) -> None:
    assert regex(item("<think>x</think>"), pattern="</think>").reward == 1.0


def test_regex_without_match_is_a_parse_error(item: MakeItem) -> None:
    score = regex(item("no idea"), pattern=r"(?P<answer>\d+)")
    assert (score.reward, score.status) == (0.0, ScoreStatus.PARSE_ERROR)


def test_regex_with_a_bad_pattern_raises(item: MakeItem) -> None:
    with pytest.raises(re.error):
        regex(item("x"), pattern="(")


def test_environment_passes_through(item: MakeItem) -> None:
    assert environment(item("", environment_reward=0.25)) == 0.25


def test_python_itself_calls_nothing(item: MakeItem) -> None:
    with pytest.raises(InvalidError, match="called by reward workers only"):
        python(item("42"), function="paceline.rewards.exact:exact", casefold=True)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(16_000, 0.0), (16_384, 0.0), (18_432, -0.5), (20_480, -1.0), (24_576, -1.0)],
)
def test_overlong_grows_over_the_last_tokens_before_the_limit(
    item: MakeItem, length: int, penalty: float
) -> None:
    turns = (RewardTurn("", num_tokens=length), RewardTurn("", num_tokens=5))
    given = replace(item("x"), turns=turns, max_tokens=20_480)
    assert overlong(given) == penalty
    assert overlong(given, limit=20_480, buffer=4096) == penalty
    assert overlong(given, limit=100_000) == 0.0


def test_overlong_without_turns_or_limit_is_nothing(item: MakeItem) -> None:
    assert overlong(replace(item("x"), max_tokens=1)) == 0.0
    assert overlong(item("x")) == 0.0
