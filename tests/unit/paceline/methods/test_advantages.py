"""Edges and invariants of GRPO, Dr. GRPO and RLOO; their values are in releases/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidError
from paceline.methods.dr_grpo.advantage import dr_grpo
from paceline.methods.grpo.advantage import grpo
from paceline.methods.rloo.advantage import rloo
from paceline.plugins import Context
from paceline.testing.advantages import episode_batch

Advantage = Callable[..., Any]
ALL: list[Advantage] = [grpo, dr_grpo, rloo]


def run(estimate: Advantage, rewards: list[float], groups: list[int]) -> list[float]:
    return list(estimate(episode_batch(rewards, groups), Context(step=0, total_steps=1)))


@pytest.mark.parametrize("estimate", ALL)
def test_one_sample_has_no_advantage(estimate: Advantage) -> None:
    assert run(estimate, [3.0, 1.0, 0.0], [0, 1, 1])[0] == 0.0


@pytest.mark.parametrize("estimate", ALL)
def test_zero_variance_is_zero_despite_rounding(estimate: Advantage) -> None:
    assert run(estimate, [0.1] * 3 + [1e6 + 0.1] * 3, [0] * 3 + [1] * 3) == [0.0] * 6


@pytest.mark.parametrize("estimate", ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_must_be_finite(estimate: Advantage, bad: float) -> None:
    with pytest.raises(InvalidError, match="episode 1 of the batch"):
        run(estimate, [0.0, bad], [0, 0])


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.integers(0, 3))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], shift: int) -> None:
    for estimate in ALL:
        found = np.array(run(estimate, rewards, [0] * len(rewards)))
        assert abs(found.sum()) < 1e-6 * max(1.0, np.abs(found).max())
        moved = run(estimate, [r + shift for r in rewards], [0] * len(rewards))
        assert np.isfinite(moved).all()
