"""Kind `exact`: the whole response is the answer."""

from __future__ import annotations

from paceline.interfaces import RewardInput
from paceline.types import Score, VerifierStatus
from paceline_reward.builtin.answers import expected, normal


def exact(
    item: RewardInput,
    *,
    answer_field: str = "answer",
    strip: bool = True,
    casefold: bool = False,
    numeric: bool = False,
) -> Score:
    """1 if the response equals the payload's `answer_field`, else 0.

    With `numeric`, numbers are compared by value; a response that is none is a `parse_error`.
    """
    wanted = expected(item.task, answer_field)
    given = normal(item.response, strip=strip, casefold=casefold, numeric=numeric)
    if given is None:
        return Score(
            reward=0.0,
            parts={},
            status=VerifierStatus.PARSE_ERROR,
            raw_answer=item.response,
            detail="the response is not a number",
        )
    same = given == normal(wanted, strip=strip, casefold=casefold, numeric=numeric)
    return Score(reward=float(same), parts={}, raw_answer=item.response, normalised_answer=given)
