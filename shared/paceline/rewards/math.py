"""Reward `math`: mathematical equality, by Hugging Face's math-verify."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.plugins import RewardInput, declares
from paceline.rewards.answers import expected, final, in_tags, unanswered
from paceline.rewards.bounded import ExceededError, bounded
from paceline.types import Score

Find = Literal["any", "boxed", "latex", "expression"]
_ANSWER_CHARS = 1000
_GOLD_CPU_S = 10.0


def _load(*, find: Find = "any", **options: Any) -> None:
    """Import sympy and build the parser's tables, half a second or two."""
    del options
    # It warns of each call without its own timeouts, which use the signal that ends orphans.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _parsed("$1$", find)


@declares(load=_load)
def math(
    item: RewardInput,
    *,
    answer_field: str = "answer",
    find: Find = "any",
    digits: Annotated[int, Field(ge=0, le=15)] = 6,
    cpu_s: Annotated[float, Field(gt=0, le=60)] = 2.0,
    max_chars: Annotated[int, Field(ge=100, le=1_000_000)] = 20_000,
) -> Score:
    r"""1 if the answer equals the task's as a number, expression, set, interval or matrix, else 0.

    If there are tags `<answer>` and `</answer>`, it is between the last of them.
    A response without an answer is a `parse_error`, one whose answer takes too long to read or
    compare (`9^{9^{9^9}}`) a `timeout`; both have reward 0. Only CPU time counts, so a busy machine
    makes no answer wrong.

    Args:
        item: the payload of its task has the answer, as text, LaTeX or a number.
        answer_field: of the payload.
        find: what is an answer: `boxed` only `\boxed{...}`, `latex` also other formulas,
            `expression` only plain numbers and expressions, `any` all of them, boxed ones first.
        digits: after the point, to which decimal numbers are rounded before they are compared.
        cpu_s: CPU time for a response.
        max_chars: of the end of the response, in which the answer is looked for.

    Raises:
        InvalidError: the answer of the task cannot be read.
    """
    gold = _gold(expected(item.task, answer_field))
    try:
        text, normal, equal = bounded(
            lambda: _compared(gold, in_tags(item.response[-max_chars:]), find, digits), cpu_s=cpu_s
        )
    except ExceededError as error:
        return unanswered(item, error.message, status=ScoreStatus.TIMEOUT)
    if not normal:
        return unanswered(item, "no mathematical answer")
    return Score(
        reward=float(equal),
        parts={},
        raw_answer=text[:_ANSWER_CHARS],
        normalised_answer=normal[:_ANSWER_CHARS],
    )


def _compared(gold: Sequence[Any], response: str, find: Find, digits: int) -> tuple[str, str, bool]:
    """The answer as it is written and normalised, and whether it equals `gold`."""
    from math_verify import verify

    is_there = find != "boxed" or "\\boxed" in response
    found = _parsed(response, find) if is_there else []
    if not found:
        return "", "", False
    equal = verify(list(gold), found, float_rounding=digits, timeout_seconds=None)
    return str(found[-1]), _normal(found[0], digits), equal


def _normal(value: Any, digits: int) -> str:
    """One text for equal answers: 0.5, 1/2 and 50 % are the same."""
    from sympy import Rational

    if isinstance(value, str):
        return "".join(value.split())
    try:
        if value.is_number and value.is_real:
            exact = value.doit()
            if exact.is_Float:
                exact = Rational(str(round(exact, digits)))
            return str(exact)
        return str(value)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return str(value)


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    answer = final(answer)
    # Without a mark of its own an answer is a formula: `\frac{1}{2}` or `x^2`.
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    try:
        found = bounded(lambda: _parsed(marked, "any"), cpu_s=_GOLD_CPU_S)
    except ExceededError as error:
        raise InvalidError(f"the task's answer {answer[:100]!r}: {error.message}") from None
    if not found:
        raise InvalidError(f"the task's answer {answer[:100]!r} is not mathematical")
    return tuple(found)


def _parsed(text: str, find: Find) -> list[Any]:
    from math_verify import parse

    # The last formula of the best kind that is there, as that of TRL and open-r1.
    return parse(text, list(_targets(find)), extraction_mode="first_match", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


@lru_cache
def _targets(find: Find) -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    plain = ExprExtractionConfig()
    if find == "expression":
        return (plain,)
    formulas = LatexExtractionConfig(boxed_match_priority=0)
    return (formulas, plain) if find == "any" else (formulas,)
