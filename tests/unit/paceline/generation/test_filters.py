"""What filters answer, and the built-in ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.generation.filters.balanced import balanced
from paceline.generation.filters.zero_variance import zero_variance
from paceline.plugins import Drop, Keep
from paceline.testing.filters import finished_group

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([], r"indices \[\] of 3 episodes; at least one is due"),
        ([1, 0], "ascending, from 0 to 2"),
        ([1, 1], "ascending"),
        ([-1, 0], "ascending"),
        ([0, 3], "ascending"),
        ([True, False, True], "not a mask"),
        (["0"], "cannot be interpreted as an integer"),
        ([0.0], "cannot be interpreted as an integer"),
    ],
)
def test_indices_that_are_none_of_a_group_are_refused(indices: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        Keep(indices).of(3)


@given(REWARDS, st.data())
def test_a_part_of_a_group_has_the_columns_of_its_episodes(
    rewards: list[float], data: st.DataObject
) -> None:
    count = len(rewards)
    chosen = data.draw(st.sets(st.integers(0, count - 1), min_size=1).map(sorted))
    assert Keep().of(count) == tuple(range(count))
    assert Keep(chosen).of(count) == tuple(chosen)
    group = finished_group(
        rewards,
        task=5,
        answers=[f"a{i}" for i in range(count)],
        lengths=range(count),
        truncated=[i % 2 == 0 for i in range(count)],
        parts={"style": rewards[::-1]},
    )
    part = group.only(chosen)
    assert part.task == 5
    assert part.rewards == tuple(rewards[i] for i in chosen)
    assert part.answers == tuple(f"a{i}" for i in chosen)
    assert part.lengths == tuple(chosen)
    assert part.truncated == tuple(i % 2 == 0 for i in chosen)
    assert part.parts == {"style": tuple(rewards[::-1][i] for i in chosen)}


def test_zero_variance() -> None:
    assert zero_variance(finished_group([1.0, 1.0, 1.0])) == Drop("zero_variance")
    assert zero_variance(finished_group([1.0, 0.0])) == Keep()
    assert zero_variance(finished_group([1.0])) == Keep()


def test_variance_of_some_parts_does_not_count() -> None:
    parts = {"right": [1.0, math.nan, 1.0], "short": [0.0, -0.5, 0.0]}
    late = finished_group([1.0, 0.5, 1.0], parts=parts)
    assert zero_variance(late) == Keep()
    assert zero_variance(late, without=("short",)) == Drop("zero_variance")
    assert zero_variance(late, without=("right",)) == Keep()
    assert zero_variance(late, without=("right", "short")) == Keep()  # nothing else to go by
    alone = finished_group([1.0, 0.5])  # the only part of a reward is not listed
    assert zero_variance(alone, without=("short",)) == Keep()


@given(REWARDS, st.integers(2, 14))
def test_a_balanced_part_has_both_kinds_if_the_group_has_and_is_otherwise_its_beginning(
    rewards: list[float], keep: int
) -> None:
    kept = balanced(finished_group(rewards), keep=keep).of(len(rewards))
    assert len(kept) == min(keep, len(rewards))
    kinds = {reward > 0.5 for reward in rewards}
    assert {rewards[i] > 0.5 for i in kept} == kinds
    assert kept[:-1] == tuple(range(len(kept) - 1))
    if {reward > 0.5 for reward in rewards[:keep]} == kinds:
        assert kept[-1] == len(kept) - 1
    else:
        first = [reward > 0.5 for reward in rewards].index(not rewards[0] > 0.5)
        assert kept[-1] == first
