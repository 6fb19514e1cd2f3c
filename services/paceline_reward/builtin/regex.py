"""Kind `regex`: a pattern finds the answer in the response."""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.interfaces import RewardInput
from paceline.types import Score, VerifierStatus
from paceline_reward.builtin.exact import exact


def regex(
    item: RewardInput,
    *,
    pattern: str,
    answer_field: str = "answer",
    strip: bool = True,
    casefold: bool = False,
    numeric: bool = False,
) -> Score:
    """1 if the first match's group `answer` equals the payload's `answer_field`, else 0.

    Without such a group a match alone is worth 1. No match is a `parse_error`.
    """
    found = re.search(pattern, item.response)
    if found is None:
        return Score(
            reward=0.0,
            parts={},
            status=VerifierStatus.PARSE_ERROR,
            raw_answer=item.response,
            detail="the pattern does not match",
        )
    if "answer" not in found.re.groupindex:
        return Score(reward=1.0, parts={}, raw_answer=found.group())
    return exact(
        replace(item, response=found.group("answer") or ""),
        answer_field=answer_field,
        strip=strip,
        casefold=casefold,
        numeric=numeric,
    )
