"""Reward `format`: the tags that a response should have, or a pattern that it should match."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from paceline.enums import ScoreStatus
from paceline.plugins import RegularExpression, RewardInput
from paceline.rewards.answers import RAW_CHARS
from paceline.rewards.bounded import ExceededError, bounded
from paceline.types import Score

Tag = Annotated[str, Field(pattern=r"^[A-Za-z][\w-]{0,63}$")]
_MOST_TAGS = 16


def _some(tags: tuple[str, ...]) -> tuple[str, ...]:
    if not 0 < len(tags) <= _MOST_TAGS:
        raise ValueError(f"has to have 1 to {_MOST_TAGS} tags")
    return tags


Tags = Annotated[tuple[Tag, ...], AfterValidator(_some)]


def format(
    item: RewardInput,
    *,
    tags: Tags = ("think", "answer"),
    opened: bool = False,
    around: bool = False,
    partial: bool = False,
    pattern: Annotated[str, RegularExpression()] = "",
    cpu_s: Annotated[float, Field(gt=0, le=60)] = 1.0,
) -> Score:
    """1 if the response consists of these tags, each once and in this order, else 0.

    `<think>...</think><answer>...</answer>` by default (DeepSeek-R1, arXiv 2501.12948).
    Anything else is a `parse_error`. What stands in the last tag is the raw answer.

    Args:
        item: its last turn counts.
        tags: names without brackets.
        opened: the prompt ends with the first opening tag, as templates of reasoning models do.
        around: there may be other text before, between and after the tags.
        partial: the share of opening and closing tags that occur exactly once, in any order.
        pattern: a regular expression that the whole response has to match, instead of tags; `.`
            matches line ends too. One that takes longer than `cpu_s` is a `timeout`.
        cpu_s: CPU time for the pattern.
    """
    response = item.response
    if pattern:
        return _matching(item, pattern, cpu_s)
    marks = [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")][opened:]
    if partial:
        reward = sum(response.count(mark) == 1 for mark in marks) / len(marks)
    else:
        reward = float(_in_order(response, marks, opened=opened, around=around))
    _, begun, rest = response.rpartition(f"<{tags[-1]}>")
    answer, closed, _ = rest.partition(f"</{tags[-1]}>")
    return Score(
        reward=reward,
        parts={},
        status=ScoreStatus.OK if reward == 1.0 else ScoreStatus.PARSE_ERROR,
        raw_answer=answer.strip()[-RAW_CHARS:] if begun and closed else "",
        detail="" if reward == 1.0 else f"not as {''.join(marks)}",
    )


def _in_order(response: str, marks: list[str], *, opened: bool, around: bool) -> bool:
    if any(response.count(mark) != 1 for mark in marks):
        return False
    places = [response.index(mark) for mark in marks]
    if places != sorted(places):
        return False
    if around:
        return True
    # Text stands inside tags only: what is before an opening tag, or after the last one, is blank.
    ends = [place + len(mark) for place, mark in zip(places, marks, strict=True)]
    outside = [response[ends[-1] :]]
    for index in range(opened, len(marks), 2):
        outside.append(response[ends[index - 1] if index else 0 : places[index]])
    return not any(text.strip() for text in outside)


def _matching(item: RewardInput, pattern: str, cpu_s: float) -> Score:
    try:
        match = bounded(lambda: re.fullmatch(pattern, item.response, re.DOTALL), cpu_s=cpu_s)
    except ExceededError as error:
        return Score(reward=0.0, parts={}, status=ScoreStatus.TIMEOUT, detail=error.message)
    if match is None:
        detail = "the pattern does not match"
        return Score(reward=0.0, parts={}, status=ScoreStatus.PARSE_ERROR, detail=detail)
    answer = match["answer"] if "answer" in match.re.groupindex else ""
    return Score(reward=1.0, parts={}, raw_answer=(answer or "").strip()[-RAW_CHARS:])
