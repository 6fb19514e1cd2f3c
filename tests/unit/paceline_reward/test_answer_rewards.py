"""Rewards `math`, `numeric`, `format`, `length` and `json_schema`: worked examples, and bombs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.options import wrong_options
from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.plugins import RewardTurn
from paceline.rewards.format import format
from paceline.rewards.json_schema import json_schema
from paceline.rewards.length import length
from paceline.rewards.math import math
from paceline.rewards.numeric import numeric, plain
from paceline.testing.rewards import item
from paceline.types import Score

OK, NONE, LATE = ScoreStatus.OK, ScoreStatus.PARSE_ERROR, ScoreStatus.TIMEOUT
DRAFT_3 = {"$schema": "http://json-schema.org/draft-03/schema#"}
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


def schema_with(part: dict[str, Any]) -> dict[str, Any]:
    """Options of `json_schema`: a part deep in a schema, beside what references may lead to."""
    places = {"odd": {"type": "objekt"}, "list": ["a"], "$defs": {"name": {"pattern": "^a"}}}
    return {"schema": {**places, "allOf": [{"items": {"$ref": "#/$defs/name"}}, {"not": part}]}}


def said(score: Score) -> tuple[float, ScoreStatus, str]:
    """What a test compares."""
    return score.reward, score.status, score.normalised_answer


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"so $\boxed{0.5}$", r"\frac{1}{2}", (1.0, OK, "1/2")),
        (r"The answer is 1/2.", "0.5", (1.0, OK, "1/2")),
        (r"thus $(x+1)^2$", "x^2+2x+1", (1.0, OK, "(x + 1)**2")),
        (r"$\{3, 2, 1\}$", r"\{1,2,3\}", (1.0, OK, "{1, 2, 3}")),
        (r"$2\sqrt{2}$", r"\sqrt{8}", (1.0, OK, "2*sqrt(2)")),
        (r"first $\boxed{3}$, no: $\boxed{4}$", "4", (1.0, OK, "4")),
        (r"$\boxed{7}$ and then $9$", "7", (1.0, OK, "7")),
        ("it is 71", "... so 36 + 36 = 72\n#### 72", (0.0, OK, "71")),
        ("no idea", "72", (0.0, NONE, "")),
        ("", "72", (0.0, NONE, "")),
    ],
)
def test_math(response: str, answer: str, score: tuple[float, ScoreStatus, str]) -> None:
    assert said(math(item(response, answer=answer))) == score


def test_math_with_boxed_answers_only() -> None:
    assert said(math(item("it is $4$", answer="4"), find="boxed")) == (0.0, NONE, "")
    assert math(item(r"it is \boxed{4}", answer="4"), find="boxed").reward == 1.0


@pytest.mark.parametrize(
    "bomb",
    ["9**9**9**9", r"\boxed{9^{9^{9^9}}}", r"\boxed{(10^9)!}", r"\boxed{(x+1)^{10000}}"],
)
def test_math_that_cannot_be_computed_is_late_and_not_wrong(bomb: str) -> None:
    started = time.process_time()
    score = math(item(bomb, answer="9"), cpu_s=0.3)
    assert (score.reward, score.status) == (0.0, LATE)
    assert score.detail == "more than 0.3 s of CPU time"
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000,
        "$" * 20_000,
        "1 " * 50_000,
        r"\boxed{" * 3000,
        "x" * 10_000_000,
        "answer " * 9000,
    ],
)
def test_math_is_bounded_for_any_text(text: str) -> None:
    started = time.process_time()
    assert math(item(text, answer="9"), cpu_s=1.0).reward == 0.0
    assert time.process_time() - started < 3.0


def test_a_task_without_a_readable_answer_is_not_the_fault_of_the_response() -> None:
    with pytest.raises(InvalidError, match="is empty; it has to be"):
        math(item("4", answer=""))
    with pytest.raises(InvalidError, match="is no number"):
        numeric(item("4", answer="four"))


@pytest.mark.parametrize(
    "answer", ["72", 72, "72 apples", "$72$", r"\boxed{72}", "72 km/h", "(72)"]
)
def test_numeric_takes_one_number_and_words(answer: Any) -> None:
    assert numeric(item("72", answer=answer)).reward == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *(
            r"\sqrt{2}",
            "√2",
            "2x",
            r"2\pi",
            "1 + 2",
            "x = 2",
            "12:02",
            "1-2",
            "sqrt(2)",
        ),
        *("|2|", "2!", r"\pm 2", "3, 2", "2020-01-02", "5 m^2", "f2", "", "two"),
        *(None, True, False, [2], {"value": 2}),
    ],
)
def test_numeric_takes_no_other_answer_for_its_last_number(answer: Any) -> None:
    with pytest.raises(InvalidError, match="is no number: it has to be a single one"):
        numeric(item("2", answer=answer))


@pytest.mark.parametrize(
    ("response", "answer", "options", "score"),
    [
        ("not 71 but 72.", 72, {}, (1.0, OK, "72")),
        ("1,250.50 dollars", "1250.5", {}, (1.0, OK, "1250.5")),
        ("10^3", 1000, {}, (1.0, OK, "1000")),
        (r"$3 \times 10^{5}$", r"3 \times 10^{5}", {}, (1.0, OK, "300000")),
        (r"2.5\cdot10^{-1}", 0.25, {}, (1.0, OK, "0.25")),
        ("10\u00b3", 1000, {}, (1.0, OK, "1000")),
        ("1.5 million", "1500000", {}, (1.0, OK, "1500000")),
        ("2000000", "2 million", {}, (1.0, OK, "2000000")),
        ("2", "2 million", {}, (0.0, OK, "2")),
        ("1{,}000", 1000, {}, (1.0, OK, "1000")),
        (r"1\,000", 1000, {}, (1.0, OK, "1000")),
        (r"\frac12", 0.5, {}, (1.0, OK, "0.5")),
        (r"2\frac{1}{2}", 2.5, {}, (1.0, OK, "2.5")),
        ("$1,250", "1250", {}, (1.0, OK, "1250")),
        ("1.250,50", "1.250,5", {"decimal_comma": True}, (1.0, OK, "1250.5")),
        ("12,50", 12.5, {"decimal_comma": True}, (1.0, OK, "12.5")),
        ("5", 12.5, {"decimal_comma": True}, (0.0, OK, "5")),
        (r"\frac{3}{4}", "0.75", {}, (1.0, OK, "0.75")),
        ("1 1/2 cups", "1.5", {}, (1.0, OK, "1.5")),
        ("1/3", "2/6", {}, (1.0, OK, "1/3")),
        ("0.333", "1/3", {"abs_tol": 0.001}, (1.0, OK, "0.333")),
        ("0.333", "1/3", {"abs_tol": 0.0001}, (0.0, OK, "0.333")),
        ("102", "100", {"rel_tol": 0.02}, (1.0, OK, "102")),
        ("103", "100", {"rel_tol": 0.02}, (0.0, OK, "103")),
        ("15 %", "0.15", {}, (1.0, OK, "0.15")),
        ("15%", "15", {"percent": "points"}, (1.0, OK, "15")),
        ("2.5e-3", "0.0025", {}, (1.0, OK, "0.0025")),
        ("\u22123 degrees", "-3", {}, (1.0, OK, "-3")),
        ("#### 5 apples of 9", "x\n#### 5", {"mark": "####"}, (1.0, OK, "5")),
        ("it is 5", "5", {"mark": "####"}, (0.0, NONE, "")),
        ("1, 2, 3", "3", {}, (1.0, OK, "3")),
        ("version v2", "2", {}, (0.0, NONE, "")),
        ("none", "2", {}, (0.0, NONE, "")),
        ("3/0", "3", {}, (0.0, NONE, "")),
        ("9" * 5000, "9", {}, (0.0, NONE, "")),
    ],
)
def test_numeric(
    response: str, answer: Any, options: dict[str, Any], score: tuple[float, ScoreStatus, str]
) -> None:
    assert said(numeric(item(response, answer=answer), **options)) == score


@given(st.fractions(max_denominator=10**6), st.text(st.sampled_from("ab .\n"), max_size=6000))
def test_numeric_reads_what_it_writes(value: Fraction, before: str) -> None:
    score = numeric(item(f"{before} {plain(value)}", answer=plain(value)))
    assert (score.reward, score.normalised_answer) == (1.0, plain(value))


@pytest.mark.parametrize(
    "text", ["1 " * 50_000, "-" * 100_000, "1/" * 50_000, "1e9999 " * 14_000, "9" * 10_000_000]
)
def test_numeric_takes_linear_time(text: str) -> None:
    started = time.process_time()
    numeric(item(text, answer="1"))
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("response", "options", "reward"),
    [
        ("<think>a</think><answer>b</answer>", {}, 1.0),
        ("<think>a</think>\n\n<answer>b</answer>\n", {}, 1.0),
        ("well <think>a</think><answer>b</answer>", {}, 0.0),
        ("well <think>a</think> so <answer>b</answer>.", {"around": True}, 1.0),
        ("<answer>b</answer><think>a</think>", {"around": True}, 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", {}, 0.0),
        ("a</think><answer>b</answer>", {}, 0.0),
        ("a</think><answer>b</answer>", {"opened": True}, 1.0),
        ("a</think> so <answer>b</answer>", {"opened": True}, 0.0),
        ("<think>a</think><answer>b", {"partial": True}, 0.75),
        ("a</think> b", {"tags": ["think"], "opened": True, "around": True}, 1.0),
        ("<x>1</x>", {"tags": ["x"]}, 1.0),
        ("Answer: 12", {"pattern": r"Answer: (?P<answer>\d+)"}, 1.0),
        ("Answer: 12.", {"pattern": r"Answer: (?P<answer>\d+)"}, 0.0),
    ],
)
def test_format(response: str, options: dict[str, Any], reward: float) -> None:
    score = format(item(response), **options)
    assert score.reward == reward
    assert score.status is (OK if reward == 1.0 else NONE)


def test_format_tells_the_answer_and_bounds_its_pattern() -> None:
    assert format(item("<think>a</think><answer> 4 </answer>")).raw_answer == "4"
    assert format(item("it is 12"), pattern=r".*?(?P<answer>\d+)").raw_answer == "12"
    late = format(item("a" * 40), pattern=r"(a|aa)+b", cpu_s=0.2)
    assert (late.reward, late.status) == (0.0, LATE)


@pytest.mark.parametrize(
    ("tokens", "right", "options", "reward"),
    [
        # arXiv 2502.03373: 1 to 0.5 for right answers, -1 to -0.5 for wrong ones.
        (0, True, {}, 1.0),
        (50, True, {}, 0.75),
        (100, True, {}, 0.5),
        (0, False, {}, -1.0),
        (50, False, {}, -0.75),
        (100, False, {}, -0.5),
        (150, True, {}, 0.5),
        (150, True, {"exceeded": -10.0}, -10.0),
        # Kimi k1.5: 0.5 at the shortest, -0.5 at the longest, no reward for short wrong answers.
        (20, True, {"shape": "linear", "shortest": 20}, 0.5),
        (60, True, {"shape": "linear", "shortest": 20}, 0.0),
        (100, True, {"shape": "linear", "shortest": 20}, -0.5),
        (20, False, {"shape": "linear", "shortest": 20}, 0.0),
        (100, False, {"shape": "linear", "shortest": 20}, -0.5),
        # L1: 3e-4 a token off the target; 0.5 at the budget.
        (1100, True, {"shape": "target"}, -0.3),
        (100, False, {"shape": "target"}, 0.0),
        (100, True, {"shape": "budget"}, 0.5),
        (1100, True, {"shape": "budget"}, 0.2),
        (3000, True, {"shape": "budget"}, 0.0),
        (100, False, {"shape": "budget"}, 0.0),
        (10, True, {"shape": "target", "slope": 0.01}, -0.9),
    ],
)
def test_length(tokens: int, right: bool, options: dict[str, Any], reward: float) -> None:
    turns = (RewardTurn("a", num_tokens=tokens - tokens // 2), RewardTurn("b", 0.0, tokens // 2))
    given_ = replace(item("b"), turns=turns, parts={"math": float(right)})
    assert length(given_, tokens=100, **options).reward == pytest.approx(reward)


def test_length_takes_its_tokens_from_the_task_or_the_job() -> None:
    given_ = replace(item("b", budget=40), turns=(RewardTurn("b", num_tokens=40),), max_tokens=80)
    assert length(given_, tokens_field="budget").reward == pytest.approx(0.5)
    assert length(given_).reward == pytest.approx(0.75)
    for wrong in (None, "40", True, 0, 10**12):
        with pytest.raises(InvalidError, match="has to be a number of tokens"):
            length(item("b", budget=wrong), tokens_field="budget")


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"name": "Ada", "age": 36}', (1.0, OK, '{"age":36,"name":"Ada"}')),
        ('Here:\n```json\n{"name": "Ada"}\n```', (1.0, OK, '{"name":"Ada"}')),
        ('{"name": "Ada", "age": -1}', (0.1, OK, '{"age":-1,"name":"Ada"}')),
        ("{}", (0.1, OK, "{}")),
        ("[" * 90_000, (0.0, NONE, "")),
        ("[" * 500 + "]" * 500, (0.1, OK, "[" * 500 + "]" * 500)),
        ("name: Ada", (0.0, NONE, "")),
        ('{"name": NaN}', (0.0, NONE, "")),
        ("1" * 5000, (0.0, NONE, "")),
        ("x" * 10_000_000, (0.0, NONE, "")),
    ],
)
def test_json_schema(response: str, score: tuple[float, ScoreStatus, str]) -> None:
    assert said(json_schema(item(response), schema=PERSON, parsed=0.1)) == score
    assert said(json_schema(item(response, schema=PERSON), parsed=0.1)) == score
    assert said(json_schema(item(response, schema=json.dumps(PERSON)), parsed=0.1)) == score


def test_json_schema_says_what_does_not_fit_and_bounds_patterns() -> None:
    score = json_schema(item('{"name": "Ada", "age": -1}'), schema=PERSON)
    assert score.detail == "age: -1 is less than the minimum of 0"
    large = json_schema(item("1" + "0" * 400), schema={"multipleOf": 0.1})
    assert (large.reward, large.detail[:18]) == (0.0, "a number is larger")
    late = json_schema(item(json.dumps("a" * 40)), schema={"pattern": "^(a|aa)+b"}, cpu_s=0.2)
    assert (late.reward, late.status) == (0.0, LATE)


def test_json_schema_of_values_that_contain_themselves() -> None:
    children = {"type": "array", "items": {"$dynamicRef": "#node"}}
    tree = {"$dynamicAnchor": "node", "type": "object", "properties": {"children": children}}
    chain = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#"}}}]}
    beside = {"$ref": "#/definitions/a", "allOf": [{"$ref": "#/definitions/b"}]}
    ignored = DRAFT_4 | {"definitions": {"a": {}, "b": beside}, "$ref": "#/definitions/b"}
    assert json_schema(item("1"), schema=ignored).reward == 1
    assert json_schema(item("1"), schema={"then": {"$ref": "#"}}).reward == 1
    for schema, text in ((tree, '{"children": [{"children": []}]}'), (chain, '{"next": null}')):
        assert json_schema(item(text), schema=schema).reward == 1
    assert json_schema(item('{"children": [1]}'), schema=tree).reward == 0
    assert json_schema(item('{"next": {"next": 1}}'), schema=chain).reward == 0


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("math", {"find": "latx"}, "reward.0.find: Input should be 'any', 'boxed', "),
        ("math", {"cpu_s": 0}, "reward.0.cpu_s: Input should be greater than 0"),
        (
            "numeric",
            {"abs_tol": -1},
            "reward.0.abs_tol: Input should be greater than or equal to 0",
        ),
        ("numeric", {"tolerance": 1}, "reward.0.tolerance: unknown option of 'numeric'; allowed: "),
        ("format", {"tags": ["<think>"]}, "reward.0.tags.0: String should match pattern"),
        ("length", {"shape": "cubic"}, "reward.0.shape: Input should be 'cosine', "),
        ("length", {"right": [1.0]}, "reward.0.right"),
        ("json_schema", {"schema": {"type": "objekt"}}, "reward.0.schema: not a JSON schema: type"),
        ("json_schema", {"schema": {"$ref": "http://x/y"}}, "reward.0.schema: schemas of other "),
        ("json_schema", schema_with({"$ref": "#/$defs/y"}), "reward.0.schema: $ref '#/$defs/y' l"),
        ("json_schema", schema_with({"$ref": "other.json"}), "reward.0.schema: $ref 'other.json'"),
        ("json_schema", schema_with({"$ref": "#/allOf/b"}), "reward.0.schema: $ref '#/allOf/b' l"),
        ("json_schema", schema_with({"$ref": "#/odd"}), "reward.0.schema: not a JSON schema: type"),
        ("json_schema", schema_with({"$ref": "#/list"}), "reward.0.schema: not a JSON schema: "),
        ("json_schema", {"schema": {"$ref": "#"}}, "reward.0.schema: a $ref leads back to itself"),
        ("json_schema", schema_with({"$ref": "#"}), "reward.0.schema: a $ref leads back to itself"),
        ("json_schema", {"schema": {"$schema": []}}, "reward.0.schema: not a JSON schema"),
        (
            "json_schema",
            {"schema": DRAFT_3 | {"extends": {"type": "object"}}},
            "reward.0.schema: not a JSON schema",
        ),
        ("json_schema", schema_with({"pattern": "("}), "reward.0.schema: not a JSON schema: "),
        (
            "json_schema",
            {"schema": {"pattern": f"a{{{10**20}}}"}},
            "reward.0.schema: not a JSON schema: the repetition number is too large",
        ),
        (
            "json_schema",
            {"schema": DRAFT_4 | {"patternProperties": {"(": {}}}},
            "reward.0.schema: pattern '(': missing )",
        ),
        ("judge", {}, "reward.0.model: is missing"),
        ("judge", {"model": "m", "prompt": "Good?"}, "reward.0.prompt: has to contain {response}"),
        ("judge", {"model": "m", "api_key": "sk-1"}, "reward.0.api_key: unknown option of 'judge'"),
    ],
)
def test_options_are_refused_with_their_field(
    kind: str, options: dict[str, Any], problem: str
) -> None:
    line, *_ = wrong_options("reward.0", "rewards", kind, options)
    assert line.startswith(problem)


def test_options_of_the_documentation_are_accepted() -> None:
    """Lists of a job file are tuples of the function."""
    for kind, options in {
        "format": {"tags": ["reasoning", "answer"]},
        "length": {"right": [1.0, 0.2], "wrong": [-1, -0.2]},
        "json_schema": schema_with({"properties": {"$ref": {"const": {"$ref": "none"}}}}),
    }.items():
        assert not list(wrong_options("reward.0", "rewards", kind, options))
