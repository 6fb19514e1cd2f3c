"""Rewards `template_format` and `template_answer`: what the template of the prompt asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.plugins import RewardInput, declares
from paceline.rewards.exact import exact
from paceline.types import Score

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@declares(inline=True, needs=("transform",))
def template_format(item: RewardInput) -> float:
    """The share of the template's tags that the response has exactly once; 1 if it has none.

    So .25 for each of four tags, and a third for each of three (arXiv 2602.03190).

    Raises:
        InvalidError: the job's transform does not say which tags its templates have.
    """
    tags = _tags(item)
    return sum(item.response.count(tag) == 1 for tag in tags) / len(tags) if tags else 1.0


@declares(inline=True, needs=("transform",))
def template_answer(
    item: RewardInput,
    *,
    answer_field: str = "answer",
    strip: bool = True,
    casefold: bool = False,
    numeric: bool = False,
) -> Score:
    """`exact` on the part of the response in which its template asks for the answer.

    Raises:
        InvalidError: the job's transform does not say where that is.
    """
    answer = _answer(item.response, str(item.variant_meta.get("answer", "whole")), _tags(item))
    if answer is None:
        return Score(
            reward=0.0,
            parts={},
            status=ScoreStatus.PARSE_ERROR,
            raw_answer=item.response,
            detail=f"no answer where template {item.variant!r} asks for it",
        )
    return exact(
        replace(item, response=answer),
        answer_field=answer_field,
        strip=strip,
        casefold=casefold,
        numeric=numeric,
    )


def _tags(item: RewardInput) -> Sequence[str]:
    tags = item.variant_meta.get("tags")
    if not isinstance(tags, list):
        raise InvalidError(f"variant {item.variant!r} of the prompt does not say which tags it has")
    return [str(tag) for tag in tags]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _answer(response: str, place: str, tags: Sequence[str]) -> str | None:
    if place == "tags":
        begin, end = tags[-2:]
        _, opened, rest = response.rpartition(begin)
        answer, closed, _ = rest.partition(end)
        return answer if opened and closed else None
    if place == "boxed":
        every = _BOXED.findall(response)
        return every[-1] if every else None
    if place == "line":
        lines = response.strip().splitlines()
        return lines[-1].rpartition(":")[2] if lines else None
    return response
