"""Reward `math` on pairs of a gold and an answer, from public reports and of our own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidError
from paceline.rewards.latex import in_words, plain, spelled
from paceline.rewards.math import math
from paceline.testing.rewards import item


@dataclass(frozen=True)
class Entry:
    """A gold, with answers in a box and whole responses that are right or wrong."""

    gold: Any
    right: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    right_text: list[str] = field(default_factory=list[str])
    wrong_text: list[str] = field(default_factory=list[str])
    refused: bool = False

    @property
    def pairs(self) -> list[tuple[str, float]]:
        """Responses and their rewards."""
        return [
            *((f"so ${box(each)}$", 1.0) for each in self.right),
            *((f"so ${box(each)}$", 0.0) for each in self.wrong),
            *((each, 1.0) for each in self.right_text),
            *((each, 0.0) for each in self.wrong_text),
        ]


def box(answer: str) -> str:
    """An answer where models put it."""
    return f"\\boxed{{{answer}}}"


ENTRIES = [
    Entry(**{name: value for name, value in entry.items() if name != "from"})
    for entry in yaml.load(
        (Path(__file__).parent / "data/math_pairs.yaml").read_text(), yaml.CSafeLoader
    )
]


def test_there_are_many_pairs_in_both_directions() -> None:
    rewards = [reward for entry in ENTRIES for _, reward in entry.pairs]
    assert (rewards.count(1.0), rewards.count(0.0)) > (500, 500)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: repr(entry.gold)[:40])
def test_right_answers_are_right_and_wrong_ones_wrong(entry: Entry) -> None:
    if entry.refused:
        with pytest.raises(InvalidError, match="it has to be LaTeX, a number, or a word"):
            math(item(box("1"), answer=entry.gold))
        return
    rewards = {text: math(item(text, answer=entry.gold)).reward for text, _ in entry.pairs}
    assert rewards == dict(entry.pairs)


@pytest.mark.parametrize(
    "entry",
    [
        e
        for e in ENTRIES
        if isinstance(e.gold, str)
        and not e.refused
        and not e.gold.startswith(("\\[", "\\(", "We", "The", "Answer"))
    ],
    ids=lambda entry: repr(entry.gold)[:40],
)
def test_a_gold_is_its_own_answer(entry: Entry) -> None:
    answer = entry.gold.rpartition("####")[2].strip().strip("$")
    assert math(item(box(answer), answer=entry.gold)).reward == 1.0


@settings(max_examples=20)
@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e22)
@example(5e-324)
@example(1.7976931348623157e308)
def test_a_number_of_json_is_no_product_with_euler(gold: float) -> None:
    shown, _, exponent = f"{gold!r}e0".partition("e")
    exponent = exponent.removesuffix("e0") or "0"
    answer = f"{shown} \\times 10^{{{int(exponent)}}}"
    assert math(item(box(answer), answer=gold)).reward == 1.0
    assert math(item(box(f"-{answer}"), answer=gold)).reward == float(gold == 0)


@settings(max_examples=20)
@given(st.integers(-(10**30), 10**30), st.integers(1, 10**6))
def test_other_numbers_are_wrong_however_large(gold: int, difference: int) -> None:
    assert math(item(box(str(gold)), answer=gold)).reward == 1.0
    assert math(item(box(str(gold + difference)), answer=gold)).reward == 0.0


@settings(max_examples=20)
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(-300, -7))
def test_small_numbers_are_not_all_zero(gold: int, answer: int, exponent: int) -> None:
    is_near = abs(gold - answer) <= gold * 0.002
    response = box(f"{answer} \\times 10^{{{exponent}}}")
    equal = math(item(response, answer=f"{gold}.0 \\times 10^{{{exponent}}}")).reward == 1.0
    assert equal == is_near
    exact = math(item(response, answer=f"{gold} \\times 10^{{{exponent}}}")).reward == 1.0
    assert exact == (gold == answer)


@given(st.text(max_size=300))
@example("**" * 150)
def test_any_text_can_be_spelled(text: str) -> None:
    assert isinstance(in_words(spelled(text)), bool)
    assert plain(plain(text)) == plain(text)


@pytest.mark.parametrize(
    "text",
    [
        "*" * 20_000,
        "* " * 10_000,
        "**a " * 5000,
        "`" * 20_000,
        "1" * 20_000 + "e5",
        "1.1e9999" * 2500,
        r"1.\overline{" * 1500,
        "5 " + r"\text{" * 3000,
        r"\boxed{" + "5 apples " * 2000 + "}",
        r"\boxed{10^{999999999999}}",
        r"\boxed{1.5 \times 10^{99999999999}}",
        r"\boxed{1e9999}",
        r"\boxed{0.\overline{" + "9" * 15_000 + "}}",
        r"\boxed{\text{" + "no " * 5000 + "}}",
        r"\boxed{1" + "0" * 15_000 + "}",
        r"\boxed{" + "9^" * 500 + "9}",
        r"\boxed{\frac{1}{" * 200 + "2" + "}}" * 200,
    ],
)
@pytest.mark.parametrize("gold", ["9", "even"])
def test_hostile_answers_are_bounded(text: str, gold: str) -> None:
    started = time.process_time()
    assert math(item(text, answer=gold), cpu_s=0.5).reward == 0.0
    assert time.process_time() - started < 3.0
