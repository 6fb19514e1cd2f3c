"""Reward `exact`: the whole response must equal the expected answer."""

from __future__ import annotations

from typing import Any

from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.plugins import RewardInput, declares
from paceline.rewards.answers import expected, normal, whole
from paceline.types import Score, Task


def _check_gold(
    task: Task, *, world: str, answer_field: str = "answer", numeric: bool = False, **options: Any
) -> None:
    del world, options
    _gold(whole(task, answer_field), strip=True, casefold=False, numeric=numeric)


def _gold(answer: str, **how: bool) -> str:
    """The task's answer as responses are compared with it."""
    gold = normal(answer, **how)
    if gold is None:
        raise InvalidError(
            f"the task's answer {answer[:100]!r} is no number, and the reward compares numbers "
            "(numeric: true); the reward `numeric` reads percentages, fractions and units"
        )
    return gold


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
    gold = _gold(answer, strip=strip, casefold=casefold, numeric=numeric)
    response = normal(item.response, strip=strip, casefold=casefold, numeric=numeric)
    if response is None:
        return Score(
            reward=0.0,
            parts={},
            status=ScoreStatus.PARSE_ERROR,
            raw_answer=item.response,
            detail="the response is not a number",
        )
    return Score(
        reward=float(response == gold),
        parts={},
        raw_answer=item.response,
        normalised_answer=response,
    )
