"""Reward `exact`: the whole response must equal the expected answer."""

from __future__ import annotations

from typing import Any

from paceline.enums import ScoreStatus
from paceline.plugins import RewardInput, declares
from paceline.rewards.answers import expected, normal
from paceline.types import Score, Task


def _check_gold(task: Task, *, world: str, answer_field: str = "answer", **options: Any) -> None:
    del world, options
    expected(task, answer_field)


@declares(inline=True, row_golds=_check_gold)
def exact(
    item: RewardInput,
    *,
    answer_field: str = "answer",
    strip: bool = True,
    casefold: bool = False,
    numeric: bool = False,
) -> Score:
    """1 if the response equals the payload's `answer_field`, else 0.

    With `numeric`, numbers are compared by value; a response without one is a `parse_error`.
    """
    answer = expected(item.task, answer_field)
    response = normal(item.response, strip=strip, casefold=casefold, numeric=numeric)
    if response is None:
        return Score(
            reward=0.0,
            parts={},
            status=ScoreStatus.PARSE_ERROR,
            raw_answer=item.response,
            detail="the response is not a number",
        )
    matches = response == normal(answer, strip=strip, casefold=casefold, numeric=numeric)
    return Score(
        reward=float(matches), parts={}, raw_answer=item.response, normalised_answer=response
    )
