"""pass@k and the majority of several samples, by numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.evaluation import EvalSpec
from paceline_experience.ledger.evaluation.scores import (
    added,
    majority,
    means,
    pass_at,
    scores_of,
    standard_errors,
)
from paceline_experience.ledger.records import EpisodeSummary, EvalTotals


def sample(reward: float, answer: str = "", *, tokens: int = 3) -> EpisodeSummary:
    return EpisodeSummary(1, reward, False, tokens, tokens, 0, 10, answer)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (5, 2, 3, 0.9),  # 1 - C(3, 3) / C(5, 3)
        (10, 3, 5, 1 - 21 / 252),
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (4, 1, 4, 1.0),
        (1, 0, 1, 0.0),
        (1024, 1, 512, 0.5),
    ],
)
def test_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at(n, c, k) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(
    right: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(right)))
    passing = sum(any(subset) for subset in combinations(right, k))
    assert pass_at(len(right), sum(right), k) == pytest.approx(passing / comb(len(right), k))


@pytest.mark.parametrize(
    ("answers", "index"),
    [
        (["3", "5", "5"], 1),
        (["3", "5", "5", "3"], 0),
        (["5", "3", "3", "5"], 0),
        (["", "", "7"], 2),
        (["", ""], 0),
        (["1"], 0),
    ],
)
def test_the_majority_and_its_ties(answers: list[str], index: int) -> None:
    assert majority(answers) == index


def test_the_scores_of_a_task() -> None:
    spec = EvalSpec(
        samples=4, temperature=1.0, pass_at=(1, 2), majority_at=(1, 3, 4), pass_reward=0.5
    )
    samples = [sample(0.0, "8"), sample(0.5, "9"), sample(1.0, "9"), sample(0.2, "8")]
    assert scores_of(samples, spec) == {
        "pass@1": 0.5,
        "pass@2": pytest.approx(1 - 1 / 6),
        "maj@1": 0.0,
        "maj@3": 1.0,  # 9 twice
        "maj@4": 0.0,  # 8 and 9 twice each, and 8 first
    }


def test_samples_without_an_answer_vote_by_their_text() -> None:
    """A reward of one's own need not name answers; what it could not parse is none."""
    spec = EvalSpec(samples=3, temperature=1.0, majority_at=(3,))
    said = [sample(0.0), sample(1.0), sample(1.0)]
    texts = [replace(each, said=text) for each, text in zip(said, ("a", "b", "b"), strict=True)]
    assert scores_of(said, spec) == {"maj@3": 0.0}
    assert scores_of(texts, spec) == {"maj@3": 1.0}
    assert added(EvalTotals(), [texts, said], spec).texts == 3


def test_totals_are_sums_over_tasks() -> None:
    spec = EvalSpec(samples=2, temperature=1.0, pass_at=(2,))
    first = added(EvalTotals(), [[sample(1.0), sample(0.0)]], spec)
    both = added(first, [[sample(0.0), sample(0.0, tokens=5)]], spec)
    squares = {"reward": 0.125, "pass@2": 0.5}
    scores = {"pass@2": 1.0}
    assert both == EvalTotals(measured=2, reward=0.5, tokens=14, scores=scores, squares=squares)
    assert means(both.scores, 2) == {"pass@2": 0.5}
    assert means({}, 0) == means({"pass@2": 0.0}, 0) == {}


def test_standard_errors_count_each_task_once() -> None:
    """Task means 1, 0 and 0.5: sqrt(((0.5)^2 + (0.5)^2 + 0) / 2 / 3), however many samples."""
    for copies in (1, 8):
        tasks = [
            [sample(reward) for reward in rewards * copies]
            for rewards in ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0])
        ]
        spec = EvalSpec(samples=2 * copies, temperature=1.0, pass_at=(1,), majority_at=(1,))
        found = standard_errors(added(EvalTotals(), tasks, spec))
        assert found["reward"] == found["pass@1"] == pytest.approx(0.25 / 3**0.5 * 2)
        assert found["maj@1"] == pytest.approx((2 / 3 / 2 / 3) ** 0.5)  # 1, 0, 1
    assert standard_errors(added(EvalTotals(), [[sample(1.0)]], EvalSpec())) == {}


def test_standard_errors_of_large_rewards_lose_no_digits() -> None:
    """A sum of squares less the square of the sum would be 0, or below."""
    totals = EvalTotals()
    for reward in (1e9, 1e9 + 1, 1e9 + 2):
        totals = added(totals, [[sample(reward)]], EvalSpec())  # window by window
    assert standard_errors(totals)["reward"] == pytest.approx((2 / 2 / 3) ** 0.5)
