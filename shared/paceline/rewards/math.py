"""Reward `math`: mathematical equality, by Hugging Face's math-verify."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.plugins import RewardInput, declares
from paceline.rewards.answers import field_of, final, in_tags, unanswered
from paceline.rewards.bounded import ExceededError, bounded
from paceline.rewards.latex import MISSING, in_words, plain, spelled
from paceline.types import Score, Task

Find = Literal["any", "boxed", "latex", "expression"]
# What a gold is, and so how answers are read: a text; without variables, so that letters are units.
_Kind = Literal["words", "constant", "formula"]
_ANSWER_CHARS = 1000
_GOLD_CPU_S = 10.0
_EXACT = "1e-40"  # relative; equal numbers differ by less when evaluated
_ALLOWED = "it has to be LaTeX, a number, or a word"
_SAID = re.compile(r"(?i)^\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*[:=]?\s+(?=\S)")
_FORMULA = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)


def _load(*, find: Find = "any", **options: Any) -> None:
    """Import sympy and build the parser's tables, half a second or two."""
    del options
    # It warns of each call without its own timeouts, which use the signal that ends orphans.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _parsed("$1$", find, "constant")


def _check_gold(task: Task, *, answer_field: str = "answer", **options: Any) -> None:
    """Read the answer of a task, as for each score."""
    del options
    _gold(_written(task, answer_field))


@declares(load=_load, golds=_check_gold)
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
    gold = _gold(_written(item.task, answer_field))
    try:
        text, normal, equal = bounded(
            lambda: _compare(gold, in_tags(item.response[-max_chars:]), find, digits), cpu_s=cpu_s
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


@dataclass(frozen=True, slots=True)
class _Gold:
    """The parsed expected answer."""

    kind: _Kind
    parsed: tuple[Any, ...]
    """The value of a formula, and how it is written."""


def _compare(gold: _Gold, response: str, find: Find, digits: int) -> tuple[str, str, bool]:
    """The answer as it is written and normalised, and whether it equals `gold`."""
    response = spelled(response)
    is_there = find != "boxed" or "\\boxed" in response
    answer = _parsed(response, find, gold.kind) if is_there else []
    if not answer:
        return "", "", False
    text = str(answer[-1])
    if gold.kind == "words":
        return text, plain(text), plain(text) == plain(gold.parsed[-1])
    return text, _normal(answer[0], digits), _equal(gold.parsed, answer, digits)


def _equal(gold: Sequence[Any], answer: Sequence[Any], digits: int) -> bool:
    """Numbers and ranges by functions of ours, the rest by math-verify.

    It takes all small numbers for 0, `i` for a variable, and knows an inequality as the answer to
    an interval only the other way round.
    """
    from math_verify import verify

    value, other = _with_i(gold[0], answer[0])
    if _is_number(value) and _is_number(other):
        if value.is_real and other.is_real:
            return _same_number(value, other, digits)
        if None not in (value.is_real, other.is_real):
            parts = zip(value.doit().as_real_imag(), other.doit().as_real_imag(), strict=True)
            return all(_same_number(mine, its, digits) for mine, its in parts)
    if (same := _same_range(value, other)) is not None:
        return same
    pair = [value, *gold[1:]], [other, *answer[1:]]
    return verify(*pair, float_rounding=digits, timeout_seconds=None)


def _with_i(value: Any, other: Any) -> tuple[Any, Any]:
    """Both with `i` as the imaginary unit, if there is no other variable in them."""
    from sympy import I

    symbols = [getattr(operand, "free_symbols", None) for operand in (value, other)]
    units = dict.fromkeys({*(symbols[0] or ()), *(symbols[1] or ())}, I)
    if None in symbols or {str(unit) for unit in units} != {"i"}:
        return value, other
    return value.xreplace(units), other.xreplace(units)


def _is_number(value: Any) -> bool:
    from sympy import Expr, UnevaluatedExpr

    # A percentage has an unevaluated factor; 28 % is 28 or 0.28.
    is_plain = isinstance(value, Expr) and not value.has(UnevaluatedExpr)
    return is_plain and bool(value.is_number and value.is_finite)


def _same_range(value: Any, other: Any) -> bool | None:
    """Whether both are the same numbers; None unless one is inequalities of one variable."""
    from sympy import Set

    variables = [_variable_of(operand) for operand in (value, other)]
    is_relation = [variable is not None for variable in variables]
    if not any(is_relation) or (all(is_relation) and variables[0] != variables[1]):
        return None
    if not all(
        known or isinstance(e, Set) for known, e in zip(is_relation, (value, other), strict=True)
    ):
        return None
    try:
        mine, its = _as_set(value), _as_set(other)
        return bool(mine == its or (mine ^ its).is_empty)
    except (NotImplementedError, TypeError, ValueError):
        return None


def _variable_of(value: Any) -> Any:
    """The only variable of inequalities: of one, of a chain, of several with `or`; else None."""
    from sympy import And, FiniteSet, Or
    from sympy.core.relational import GreaterThan, LessThan, StrictGreaterThan, StrictLessThan

    parts = value.args if isinstance(value, (And, Or, FiniteSet)) else (value,)
    kinds = (GreaterThan, LessThan, StrictGreaterThan, StrictLessThan)
    if not parts or not all(isinstance(part, kinds) for part in parts):
        return None
    variables = value.free_symbols
    return next(iter(variables)) if len(variables) == 1 else None


def _as_set(value: Any) -> Any:
    from sympy import FiniteSet, Union

    if _variable_of(value) is None:
        return value.doit()
    parts = cast("tuple[Any, ...]", value.args) if isinstance(value, FiniteSet) else (value,)
    return Union(*(part.doit().as_set() for part in parts))


def _same_number(gold: Any, answer: Any, digits: int) -> bool:
    """Exactly, or to `digits` digits after the point if one is a decimal number.

    So that small numbers are not all 0, they also differ by a share of the gold at most.
    """
    from sympy import Float, Rational

    has_decimal = gold.has(Float) or answer.has(Float)
    gold, answer = _without_floats(gold), _without_floats(answer)
    difference = gold - answer
    if not difference.is_Rational:
        difference = difference.evalf(15)
    share, absolute = Rational(_EXACT), None
    if has_decimal:
        share, absolute = Rational(2, 10 ** min(digits, 3)), Rational(1, 2 * 10**digits)
    elif gold.is_Rational and answer.is_Rational:
        return bool(difference == 0)
    size = abs(gold if gold.is_Rational else gold.evalf(15))
    is_near = abs(difference) <= share * size
    return bool(is_near and (absolute is None or abs(difference) <= absolute))


def _without_floats(value: Any) -> Any:
    """The value with its decimal numbers as they are written, which floats would round."""
    from sympy import Float, Rational

    return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)}).doit()


def _normal(value: Any, digits: int) -> str:
    """One text for equal answers: 0.5, 1/2 and 50 % are the same."""
    from sympy import Rational

    if isinstance(value, str):
        return "".join(value.split())
    try:
        if value.is_number and value.is_real:
            exact = value.doit()
            if exact.is_Float:
                exact = Rational(str(round(exact, digits))) or exact
            return str(exact)
        return str(value)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return str(value)


def _written(task: Task, field: str) -> str:
    """The task's answer as a formula: numbers without exponents, as `1e+22` would be Euler's."""
    value = field_of(task, field)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InvalidError(f"field {field!r} is {json.dumps(value)[:100]}; {_ALLOWED}")
    return value if isinstance(value, str) else f"{Decimal(repr(value)):f}"


@lru_cache(maxsize=4096)
def _gold(answer: str) -> _Gold:
    written = spelled(_SAID.sub("", final(answer)))
    if written.strip()[:1] == "{" and _is_json(written):
        raise InvalidError(f"the task's answer {answer[:100]!r} is an object of JSON; {_ALLOWED}")
    if written.strip().casefold() in MISSING:
        raise InvalidError(f"the task's answer {answer[:100]!r} is a missing value; {_ALLOWED}")
    if not any(map(str.isalnum, written)):
        what = "cannot be read" if written.strip() else "is empty"
        raise InvalidError(f"the task's answer {answer[:100]!r} {what}; {_ALLOWED}")
    is_marked = "\\boxed" in written or _FORMULA.search(written)
    marked = written if is_marked else f"\\boxed{{{written}}}"
    try:
        text = bounded(lambda: _parsed(marked, "any", "words"), cpu_s=_GOLD_CPU_S)
        if text and in_words(str(text[-1])):
            return _Gold("words", (text[-1],))
        value = bounded(lambda: _parsed(marked, "any", "formula"), cpu_s=_GOLD_CPU_S)
    except ExceededError as error:
        raise InvalidError(f"the task's answer {answer[:100]!r}: {error.message}") from None
    if not value or isinstance(value[0], str) or _is_undefined(value[0]):
        raise InvalidError(f"the task's answer {answer[:100]!r} is not mathematical; {_ALLOWED}")
    value = [_result(value[0]), *value[1:]]
    return _Gold("formula" if _variables(value[0]) else "constant", tuple(value))


def _is_undefined(value: Any) -> bool:
    """Whether it is no value at all, as `1/0`."""
    from sympy import nan, zoo

    return hasattr(value, "has") and bool(value.has(nan, zoo))


def _result(value: Any) -> Any:
    """The result of a calculation without variables: 9 for `4 + 5 = 9`."""
    from sympy import Eq

    if not isinstance(value, Eq) or value.free_symbols:
        return value
    left: Any = value.lhs
    return value.rhs if left.equals(value.rhs) else value


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _variables(value: Any) -> bool:
    """Whether a value has variables, but for the name that an assignment gives it."""
    from sympy import Eq, Symbol

    if isinstance(value, Eq) and isinstance(value.lhs, Symbol):
        value = value.rhs
    return bool(getattr(value, "free_symbols", ()))


def _parsed(text: str, find: Find, kind: _Kind) -> list[Any]:
    from math_verify import parse

    # The last formula of the best kind that is there, as that of TRL and open-r1.
    wanted = list(_targets(find, kind))
    return parse(text, wanted, extraction_mode="first_match", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


@lru_cache
def _targets(find: Find, kind: _Kind) -> tuple[Any, ...]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    expression = ExprExtractionConfig()
    if find == "expression":
        return (expression,)
    normalised = NormalizationConfig(
        basic_latex=kind != "words",
        # math-verify takes a last letter for a unit: `3t` is 3, and `a + c` ends after `+`.
        units=kind == "constant",
        malformed_operators=kind != "words",
        nits=kind != "words",
    )
    formulas = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalised)
    return (formulas, expression) if find == "any" else (formulas,)
