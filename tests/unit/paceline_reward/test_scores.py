"""What a reward function may return."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import ScoreStatus
from paceline.types import Score
from paceline_reward.scores import MAX_REWARD, as_score


@pytest.mark.parametrize(
    "value",
    [
        *(True, 1, 1.0, Fraction(1), Decimal(1), np.bool_(True), np.float32(1), np.float16(1)),
        *(np.int64(1), np.array(1.0), torch.tensor(1.0), torch.tensor(True), torch.tensor(1)),
        torch.tensor(1.0, dtype=torch.bfloat16),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_scalars_are_numbers(value: Any) -> None:
    assert as_score(value) == Score(reward=1.0, parts={})
    assert as_score(Score(reward=value, parts={"a": value})) == Score(1.0, {"a": 1.0})
    assert type(as_score(value).reward) is float


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "NoneType"),
        ("1.0", "str"),
        ([1.0], "list"),
        ((1.0, {}), "tuple"),
        ({"score": 1.0}, "dict"),
        (1j, "complex"),
        (np.array([1.0]), "numpy.ndarray"),
        (np.array([1.0, 2.0]), "numpy.ndarray"),
        (np.str_("1"), "numpy.str_"),
        (torch.tensor([1.0]), "torch.Tensor"),
        (torch.tensor(1j), "torch.Tensor"),
        (Decimal("sNaN"), "decimal.Decimal"),
        (10**400, "int"),
    ],
)
def test_anything_else_is_refused_by_its_type(value: Any, kind: str) -> None:
    score = as_score(value)
    assert (score.reward, score.status) == (0.0, ScoreStatus.INFRA_ERROR)
    assert score.detail.startswith(f"returned {kind}: ")
    assert as_score(Score(reward=value, parts={})).status is ScoreStatus.INFRA_ERROR
    assert as_score(Score(reward=0.0, parts={"a": value})).status is ScoreStatus.INFRA_ERROR


@given(st.floats() | st.decimals(allow_nan=False) | st.integers() | st.fractions())
def test_rewards_that_no_batch_can_hold_are_refused(value: Any) -> None:
    score = as_score(value)
    if abs(value) <= MAX_REWARD:
        assert (score.reward, score.status) == (float(value), ScoreStatus.OK)
    else:
        assert (score.reward, score.status) == (0.0, ScoreStatus.INFRA_ERROR)


@pytest.mark.parametrize("value", [1e300, -1e300, 1e13, float("inf"), float("nan")])
def test_a_refusal_says_what_is_allowed(value: float) -> None:
    allowed = "rewards have to be finite numbers from -1e+12 to 1e+12, and parts finite"
    assert as_score(value).detail == f"returned {value!r} with parts {{}}; {allowed}"
    part = as_score(Score(reward=0.0, parts={"a": value}))
    assert part.detail.endswith("" if math.isfinite(value) else allowed)
    assert (part.status is ScoreStatus.OK) == math.isfinite(value)
