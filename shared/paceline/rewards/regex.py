"""Reward `regex`: a pattern extracts the answer from the response."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

from paceline.enums import ScoreStatus
from paceline.plugins import RegularExpression, RewardInput
from paceline.rewards.exact import exact
from paceline.types import Score


def regex(
    item: RewardInput,
    *,
    pattern: Annotated[str, RegularExpression()],
    answer_field: str = "answer",
    strip: bool = True,
    casefold: bool = False,
    numeric: bool = False,
) -> Score:
    """1 if the first match's group `answer` equals the payload's `answer_field`, else 0.

    Without such a group any match scores 1. No match is a `parse_error`.
    """
    match = re.search(pattern, item.response)
    if match is None:
        return Score(
            reward=0.0,
            parts={},
            status=ScoreStatus.PARSE_ERROR,
            raw_answer=item.response,
            detail="the pattern does not match",
        )
    if "answer" not in match.re.groupindex:
        return Score(reward=1.0, parts={}, raw_answer=match.group())
    return exact(
        replace(item, response=match.group("answer") or ""),
        answer_field=answer_field,
        strip=strip,
        casefold=casefold,
        numeric=numeric,
    )
