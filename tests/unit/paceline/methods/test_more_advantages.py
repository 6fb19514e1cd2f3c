"""Worked numbers, edges and invariants of the advantages besides GRPO, RLOO and Dr. GRPO."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidError
from paceline.methods.d3s.advantage import d3s_episodes, most_varied
from paceline.methods.dart.advantage import dart_trim
from paceline.methods.dr_grpo.advantage import dr_grpo
from paceline.methods.fapo.advantage import fapo
from paceline.methods.gapo.advantage import gapo
from paceline.methods.gdpo.advantage import gdpo
from paceline.methods.grpo.advantage import grpo
from paceline.methods.mapo.advantage import mapo
from paceline.methods.mc_grpo.advantage import mc_grpo
from paceline.methods.mssr.advantage import forgetting
from paceline.methods.outcome_exploration.advantage import MAX_ANSWERS, outcome_exploration
from paceline.methods.puzzlecraft.advantage import distinct, entropy, puzzlecraft
from paceline.methods.reinforce_pp.advantage import reinforce_pp, reinforce_pp_baseline
from paceline.methods.rloo.advantage import rloo
from paceline.methods.rorecomp.advantage import rorecomp
from paceline.methods.scope.advantage import shared_prefix
from paceline.methods.turn_level.advantage import turn_level
from paceline.methods.ui_s1.advantage import ui_s1
from paceline.methods.xrpo.advantage import xrpo_novelty
from paceline.plugins import Context, EpisodeBatch, GroupOutcome
from paceline.testing.advantages import episode_batch

START = Context(step=0, total_steps=101)
rewards_lists = st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=10)


def of_one_group(rewards: list[float], **columns: Any) -> EpisodeBatch:
    return episode_batch(rewards, [0] * len(rewards), **columns)


def close(found: Any, expected: Any, abs_: float = 1e-5) -> None:
    assert np.asarray(found).tolist() == pytest.approx(np.asarray(expected).tolist(), abs=abs_)


def test_reinforce_pp_discounts_by_token() -> None:
    batch = episode_batch([1.0, -1.0], [0, 1], lengths=[3, 2])
    close(reinforce_pp(episode_batch([1.0], [0]), START), [0.0])
    discounted = reinforce_pp(batch, START, gamma=0.5, center=False)
    close(discounted[:3] / discounted[2], [0.25, 0.5, 1.0])
    close(discounted[3:] / discounted[2], [-0.5, -1.0])


@given(st.floats(-1e6, 1e6), st.lists(st.integers(1, 9), min_size=2, max_size=9))
def test_equal_rewards_are_no_signal(reward: float, lengths: list[int]) -> None:
    """Nor is the rounding error of their mean, divided by a deviation of nearly 0."""
    batch = episode_batch([reward] * len(lengths), [0] * len(lengths), lengths=lengths)
    for estimate in (reinforce_pp, reinforce_pp_baseline, grpo, dr_grpo, rloo):
        assert not np.any(estimate(batch, START)), estimate.__name__


def test_reinforce_pp_baseline_without_centre_leaves_solved_groups_alone() -> None:
    batch = episode_batch([1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], lengths=[2, 1, 1, 1, 1, 1])
    assert reinforce_pp_baseline(batch, START, center=False)[3:].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 0, 0], [1.224743, 1.224743, 0, 0]),
        ([2, 2, 2], [0, 0, 0]),
        ([2], [0]),
    ],
)
def test_gapo(rewards: list[float], expected: list[float]) -> None:
    close(gapo(of_one_group(rewards), START), expected)


def puzzle_weight(rewards: list[float], answers: str, **options: Any) -> float:
    """What the advantages of a group are multiplied with."""
    batch = replace(of_one_group(rewards, answers=list(answers)), advantages=np.ones(len(answers)))
    found = puzzlecraft(batch, START, **options).values
    assert np.ptp(found) == 0.0
    return float(found[0])


def test_puzzlecraft_weight() -> None:
    one = [1.0, *[0.0] * 7]
    assert entropy("ABBBBBBB", 8) == pytest.approx(0.1812, abs=1e-4)
    assert entropy("ABBCCDEF", 8) == pytest.approx(0.8333, abs=1e-4)
    assert puzzle_weight(one, "ABBBBBBB", choices=8) == pytest.approx(0.1862, abs=1e-4)
    assert puzzle_weight(one, "ABBCCDEF", choices=8) == pytest.approx(0.3994, abs=1e-4)
    half = [1.0] * 4 + [0.0] * 4
    for answers, weight in (("AAAAAAAA", 0.0), ("AAAABBBB", 0.378), ("ABCDEFGH", 1.0)):
        found = puzzle_weight(half, answers, dispersion="distinct")
        assert found == pytest.approx(weight, abs=1e-3)
    # Open answers: the logarithm of distinct ones over that of the size of the group.
    assert entropy("AABB", None) == pytest.approx(0.5)
    assert (entropy("A", None), distinct("A")) == (0.0, 0.0)
    assert puzzle_weight([1.0, 1.0], "AB") == 0.0
    assert puzzle_weight([5.0, -1.0], "AB") == 0.0
    batch = replace(of_one_group([1.0, 0.0], lengths=[2, 1]), advantages=np.ones(3))
    with pytest.raises(InvalidError, match="tokens"):
        puzzlecraft(batch, START)


@pytest.mark.parametrize(
    ("rewards", "rescale", "values", "median"),
    [
        ([0.2, 0.5, 0.9], False, [-0.996678, 0, 1.328904], 0.5),
        ([0.2, 0.5, 0.9], True, [-1.495017, 0, 1.993355], 0.5),
        ([1, 0, 0], True, [3000, 0, 0], 0),
        ([0.1, 0.4, 0.5, 0.8, 0.9], True, [-1.66113, -0.415282, 0, 1.245847, 1.66113], 0.5),
        ([1, 0, 0, 0, 1], True, [2500, 0, 0, 0, 2500], 0),
        ([1, 1, 1], True, [0, 0, 0], 1),
    ],
)
def test_mc_grpo_as_released(
    rewards: list[float], rescale: bool, values: list[float], median: float
) -> None:
    found = mc_grpo(of_one_group(rewards), START, guard=False, rescale=rescale)
    close(found.values, values)
    assert found.weights is not None
    assert [r for r, w in zip(rewards, found.weights, strict=True) if not w] == [median]


def test_mc_grpo_does_not_explode_on_rewards_of_0_and_1() -> None:
    found = mc_grpo(of_one_group([1, 0, 0, 0, 1]), START)
    close(found.values, [1.822415, 0, 0, 0, 1.822415])


def test_gdpo_names_a_part_that_is_not_there() -> None:
    batch = of_one_group([2, 0], parts={"one": [1.0, 0], "two": [1.0, 0]})
    with pytest.raises(
        InvalidError, match=r"weights\.three: there is no such part; parts: one, two"
    ):
        gdpo(batch, START, weights={"three": 1.0})


def test_gdpo_with_one_part_is_grpo() -> None:
    batch = of_one_group([1, 0, 0, 0])
    close(gdpo(batch, START, eps=1e-6), grpo(batch, START))


TURNS = [(0, 1, 2.0), (0, 1, 3.0), (0, 1, 0.0), (1, 1, 1.0), (1, 1, 0.0), (1, 1, 3.0)]


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        (1.0, [0.69868, 0.59604, -1.09604, -0.69868, -0.59604, 1.09604]),
        (0.9, [0.69868, 1.09604, -1.09604, -0.69868, -1.09604, 1.09604]),
    ],
)
def test_mapo(gamma: float, expected: list[float]) -> None:
    close(mapo(of_one_group([0, 0], turns=TURNS), START, gamma=gamma), expected)


def test_a_turn_that_one_episode_alone_reaches_has_no_turn_advantage() -> None:
    batch = of_one_group([0, 0], turns=[(0, 2, 1.0), (0, 1, 5.0), (1, 1, 0.0)])
    found = mapo(batch, START, group=0.0)
    assert found.tolist() == [1.0, 1.0, 0.0, -1.0] or abs(found[2]) == 0.0
    with pytest.raises(InvalidError, match="no episode of the batch has policy tokens"):
        mapo(of_one_group([0, 1]), START)


def matched(batch: EpisodeBatch, flags: list[int]) -> EpisodeBatch:
    assert batch.turns is not None
    return replace(batch, turns=replace(batch.turns, matched=np.array(flags, np.bool_)))


def test_ui_s1() -> None:
    scores = [1, 1, 0.55, 1, 0.19, 1]
    turns = [(place // 3, 1, score) for place, score in enumerate(scores)]
    batch = matched(of_one_group([0, 0], turns=turns), [1, 1, 0, 1, 0, 1])
    step = ui_s1(batch, START, episode=0.0)
    close(step, [0.7071, 0.7071, -0.7071, -0.7071, -0.7071, 0.7071], 1e-4)
    paper = ui_s1(batch, START, step=0.0, variant="paper")
    close(paper, [0.707104] * 3 + [-0.707104] * 3)


def test_turn_level_gives_the_outcome_to_the_last_turn() -> None:
    batch = of_one_group([1, 0], turns=[(0, 1, 0.0), (0, 2, 0.0), (1, 3, 0.0)])
    found = turn_level(batch, START, gamma=0.5)
    # Returns are 0.5, 1 and 0: mean 0.5, deviation 0.5.
    close(found, [0, 1, 1, -1, -1, -1])


@pytest.mark.parametrize(
    ("kl", "monotone", "released"),
    [
        (0.0, 0.96, 0.875),
        (0.005, 0.9175, 0.9175),
        (0.01, 0.875, 0.96),
        (0.011, 0.875, 0.875),
        (None, 0.9175, 0.9175),
    ],
)
def test_mssr_forgets_by_the_kl(kl: float | None, monotone: float, released: float) -> None:
    assert forgetting(kl, 0.01, 0.875, 0.96, rule="monotone") == pytest.approx(monotone)
    assert forgetting(kl, 0.01, 0.875, 0.96, rule="released") == pytest.approx(released)


SEEN = replace(START, memory={"0": {"x": 16, "y": 4}})


@pytest.mark.parametrize(
    ("bonus", "expected"),
    [
        ("ucb_mean", [-0.333333, -0.333333, 0, 0.666667]),
        ("ucb_con", [-0.25, -0.25, 0, 0.5]),
        ("batch", [-0.25, -0.25, 0, 0]),
        ("naive", [0.25, 0.25, 0.5, 1]),
    ],
)
def test_outcome_exploration(bonus: str, expected: list[float]) -> None:
    base = [0.866024, 0.866024, -0.866024, -0.866024]
    batch = of_one_group([1, 1, 0, 0], answers=["x", "x", "y", "z"], advantages=base)
    found = outcome_exploration(batch, SEEN, coef=0.2, bonus=bonus)
    close(found.values, np.array(base) + 0.2 * np.array(expected))
    spread = replace(batch, lengths=np.array([2, 1, 1, 1]), advantages=np.array([1.0, *base]))
    assert len(outcome_exploration(spread, SEEN, coef=0.2, bonus=bonus).values) == 5


def test_a_solved_group_and_a_missing_answer_get_no_bonus() -> None:
    solved = of_one_group([1, 1], answers=["x", "z"], advantages=[0, 0])
    assert outcome_exploration(solved, SEEN, coef=1.0).values.tolist() == [0.0, 0.0]
    without = of_one_group([1, 0], answers=["x", ""], advantages=[0, 0])
    assert outcome_exploration(without, SEEN, coef=1.0).values.tolist() == [-0.25, 0.0]
    with pytest.raises(InvalidError, match="advantage_shaping"):
        outcome_exploration(of_one_group([1, 0]), SEEN, coef=1.0)


@given(st.lists(st.text(max_size=40), max_size=300))
def test_counts_of_answers_stay_bounded(answers: list[str]) -> None:
    outcome = GroupOutcome(task=0, rewards=(0.0,) * len(answers), answers=tuple(answers))
    context = replace(SEEN, outcomes=[outcome])
    batch = of_one_group([0, 0], answers=["a", "b"], advantages=[0, 0])
    counts = outcome_exploration(batch, context, coef=1.0).memory["0"]
    assert len(counts) <= MAX_ANSWERS
    assert all(0 < len(each) <= 24 for each in counts)
    if len({*answers, "x", "y"}) < MAX_ANSWERS:
        assert sum(counts.values()) == 20 + sum(map(bool, answers))


def test_xrpo_sharpens_novel_successes() -> None:
    batch = of_one_group(
        [1, 1, 0, 0],
        lengths=[2, 1, 1, 1],
        logprobs=[-0.25, -0.75, -1, -1, -0.7],
        advantages=[1, 1, -1, -1],
    )
    close(xrpo_novelty(batch, START), [1, 1.453173, -1, -1])
    other = of_one_group([1] * 4, logprobs=[-0.62, -0.68, -0.6, -0.66], advantages=[1, 1, 1, 1])
    assert xrpo_novelty(other, START)[1] == pytest.approx(1.098026, abs=1e-5)
    empty = replace(batch, lengths=np.array([2, 0, 2, 1]))
    assert np.isfinite(xrpo_novelty(empty, START)).all()


@pytest.mark.parametrize(
    ("rewards", "flawed", "expected"),
    [
        ([1, 1, -1, -1], [0, 1, 0, 0], [1.305581, 0.261116, -0.783349, -0.783349]),
        ([1, 1, 1, -1], [0, 1, 0, 0], [0.783349, -0.261116, 0.783349, -1.305581]),
        ([1, -1, -1, -1], [1, 1, 0, 0], [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_fapo(rewards: list[float], flawed: list[float], expected: list[float]) -> None:
    batch = of_one_group(rewards, parts={"exact": rewards, "flaw": flawed})
    close(fapo(batch, START, flaw="flaw").values, expected, 2e-5)
    with pytest.raises(InvalidError, match="flaw: 'x' is no part of the reward"):
        fapo(batch, START, flaw="x")


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(2, 9))
def test_dart_keeps_a_success_and_a_failure(successes: list[bool], keep: int) -> None:
    rewards = [float(each) for each in successes]
    found = dart_trim(of_one_group(rewards, advantages=rewards), START, keep=keep)
    assert found.weights is not None
    kept = np.array(successes)[found.weights > 0]
    assert len(kept) == min(keep, len(successes))
    assert set(kept.tolist()) == set(successes)


RECOMPOSED = [1.0] * 4 + [0.0] * 4
LENGTHS = [100, 200, 400, 800, 150, 300, 600, 900]


@pytest.mark.parametrize(
    ("step", "kept"),
    [(0, {100, 200, 900, 600}), (2, {100, 200, 900, 600}), (3, {400, 800, 300, 150})],
)
def test_rorecomp_splits_a_group_after_its_advantages(step: int, kept: set[int]) -> None:
    values = np.array([1.0, -1.0, 0.5, 0.25, 0.1, -0.2, 0.3, 0.7])
    batch = of_one_group(RECOMPOSED, advantages=values, lengths=LENGTHS)
    found = rorecomp(batch, replace(START, step=step))
    assert found.weights is not None
    assert set(batch.lengths[found.weights > 0].tolist()) == kept
    assert found.values.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("rewards", "first", "others"),
    [
        ([1], [1], [1]),  # there are no others
        ([1, 0], [1, 1], [1, 1]),
        ([0, 0, 0], [0, 1, 1], [1, 0, 0]),  # the longest two, rounded up
        ([1, 1, 1], [1, 1, 0], [0, 0, 1]),
    ],
)
def test_rorecomp_of_small_and_equal_groups(
    rewards: list[float], first: list[float], others: list[float]
) -> None:
    batch = of_one_group(rewards, advantages=rewards, lengths=[*range(1, len(rewards) + 1)])
    for step, expected in ((0, first), (3, others)):
        found = rorecomp(batch, replace(START, step=step))
        assert found.weights is not None
        assert found.weights.tolist() == expected


def test_rorecomp_leaves_what_has_no_weight() -> None:
    batch = of_one_group([1, 1, 0, 0], advantages=[1, 1, 1, 1])
    found = rorecomp(replace(batch, weights=np.array([0.0, 1.0, 1.0, 0.5])), START)
    assert found.weights is not None
    assert found.weights.tolist() == [0.0, 1.0, 1.0, 0.0]


def continued(advantages: list[float]) -> EpisodeBatch:
    """Episodes of 3, 4 and 5 tokens: the second continues the first after 2, the third it after 3;
    then one that continues nothing."""
    batch = of_one_group([0.0, 0.0, 1.0, 0.0], lengths=[3, 4, 5, 2], advantages=advantages)
    parents, inherited = np.array([-1, 0, 1, -1]), np.array([0, 2, 3, 0])
    return replace(batch, parents=parents, inherited=inherited)


@pytest.mark.parametrize(
    ("credit", "first", "second"),
    [("best", [3, 3, -1], [3, 3, 3, -2]), ("mean", [0, 0, -1], [0.5, 0.5, 0.5, -2])],
)
def test_what_episodes_share_has_the_credit_of_all(
    credit: Any, first: list[float], second: list[float]
) -> None:
    found = shared_prefix(continued([-1.0, -2.0, 3.0, -4.0]), START, credit=credit)
    close(found, [*first, *second, *[3] * 5, *[-4] * 2])
    tokens = np.repeat([-1.0, -2.0, 3.0, -4.0], [3, 4, 5, 2])
    close(shared_prefix(continued(tokens.tolist()), START, credit=credit), found)


def test_without_continuations_nothing_changes() -> None:
    values = [1.0, -1.0]
    batch = of_one_group(values, lengths=[3, 2], advantages=values)
    assert shared_prefix(batch, START).tolist() == values
    none = np.array([-1, -1])
    gone = replace(batch, parents=none, inherited=np.array([0, 1]))  # its parent is not trained
    close(shared_prefix(gone, START), [1, 1, 1, -1, -1])


def test_d3s_keeps_what_varies_most() -> None:
    values = [1.5, 0.9, -0.2, -0.3, -0.4, -1.5]
    batch = of_one_group(values, advantages=values)
    found = d3s_episodes(batch, START, start=0.5, end=1.0)
    assert found.weights is not None
    assert found.weights.tolist() == [1, 1, 0, 0, 0, 1]
    last = d3s_episodes(batch, replace(START, step=100), start=0.5, end=1.0)
    assert last.weights is not None
    assert last.weights.all()
    assert most_varied(np.zeros(4), 2).tolist() == [0, 1]


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_d3s_equals_brute_force(numbers: list[int], size: int) -> None:
    values = np.array(numbers, np.float64)
    found = most_varied(values, size)
    assert len(set(found.tolist())) == min(size, len(values))
    best = max(values[list(each)].var() for each in combinations(range(len(values)), len(found)))
    assert values[found].var() == pytest.approx(best)


@given(rewards_lists, st.integers(-4, 4))
def test_adding_a_constant_changes_nothing(rewards: list[float], shift: int) -> None:
    for estimate in (gapo, gdpo, reinforce_pp_baseline):
        one = np.asarray(estimate(of_one_group(rewards), START))
        two = np.asarray(estimate(of_one_group([r + shift for r in rewards]), START))
        assert np.allclose(one, two, atol=1e-3)
