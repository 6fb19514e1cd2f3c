"""Reward `numeric`: a number in the response, within a tolerance."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.errors import InvalidError
from paceline.platform.text import as_text
from paceline.plugins import RewardInput, declares
from paceline.rewards.answers import RAW_CHARS, field_of, final, unanswered
from paceline.types import Score, Task

Percent = Literal["share", "points"]
Tolerance = Annotated[float, Field(ge=0)]
_DIGITS = 400  # of a number, and of its exponent's value: more no float can hold
_MAX_CHARS = 100_000
_TAIL_CHARS = 4000  # in which the last number is looked for first
_PLAIN = r"(?:\d++(?:[,_\u00a0\u202f]\d{3}(?!\d))*+(?:\.\d++)?|\.\d++)(?:[eE][+-]?\d{1,4}+(?!\w))?"
# No two ways to read the same text, so it takes linear time: `++` and `*+` give nothing back.
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+\u2212]?)[$\u20ac\u00a3]?(?:"
    r"\\[dt]?frac\{(?P<top>\d{1,400}+)\}\{(?P<bottom>\d{1,400}+)\}|"
    rf"(?P<number>{_PLAIN})"
    rf"(?:[ ](?P<over>\d{{1,9}}+)/(?P<under>\d{{1,9}}+)|\s?/\s?(?P<divisor>{_PLAIN}))?)"
    r"(?:\s(?P<scale>hundred|thousand|million|billion|trillion|dozen)\b)?"
    r"(?P<percent>\s?\\?%|\s(?:percent|per\scent)\b)?",
)


def _power(match: re.Match[str]) -> str:
    """`10^{3}` as `1e3`, and behind a factor as its exponent."""
    power = match[2] or match[3] or unicodedata.normalize("NFKC", match[4]).replace("\u2212", "-")
    return f"{'1' if match[0].lstrip().startswith('10') else ''}e{power}"


_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# Other spellings of the same: of thousands, fractions, mixed numbers, powers of ten.
_SPELLINGS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(?<=\d)(?:\{,\}|\\text\{,\}|,\\!|\\,|\\!)[ ]?(?=\d{3}(?!\d))"), lambda _: ","),
    (re.compile(r"(\\[dt]?frac)[ ]?(\d)[ ]?(\d)(?!\d)"), lambda m: f"{m[1]}{{{m[2]}}}{{{m[3]}}}"),
    (
        re.compile(r"(?<=\d)[ ]?\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\}"),
        lambda m: f" {m[1]}/{m[2]}",
    ),
    (
        re.compile(
            r"(?:(?<=\d)[ ]?(?:\\times|\\cdot|[\u00d7·*x])|(?<![\w.,)}]))[ ]?(10)"
            r"(?:\^(?:\{([+-]?\d{1,3})\}|([+-]?\d{1,3})(?!\d))|([\u207a\u207b]?[⁰¹²³⁴-⁹]{1,3}))"
        ),
        _power,
    ),
)
# Beside the number `#` of an answer: digits, operators, functions, and a variable as in `5x`.
_OPERATORS = re.compile(
    r"[\d_^\\*+=<>\[\]|√∛∑∏∫]|#!|#[^\W\d_](?![^\W\d_])|(?<=[\w#])\(|(?<![^\W\d_])[/-]|[/-](?![^\W\d_])"
)
_WRAPPERS = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)(?=\{)|\\(?=[$%#])|\\[,;: ]|[{}]")


def _check_gold(
    task: Task,
    *,
    answer_field: str = "answer",
    percent: Percent = "share",
    decimal_comma: bool = False,
    **options: Any,
) -> None:
    """Read the answer of a task, as for each score."""
    del options
    _gold(field_of(task, answer_field), percent, decimal_comma)


@declares(inline=True, golds=_check_gold)
def numeric(
    item: RewardInput,
    *,
    answer_field: str = "answer",
    mark: Annotated[str, Field(max_length=100)] = "",
    abs_tol: Tolerance = 0.0,
    rel_tol: Tolerance = 0.0,
    percent: Percent = "share",
    decimal_comma: bool = False,
) -> Score:
    r"""1 if the last number of the response is the task's, else 0; none is a `parse_error`.

    Numbers are exact: `1,250.50`, `3/4`, `1 1/2`, `\frac{3}{4}`, `2.5e-3`, `$12`, `15 %`,
    `6 \times 10^{23}`, `2 million`. Numbers x and y are equal if
    |x - y| <= max(abs_tol, rel_tol |y|), y being the task's.

    Args:
        item: the payload of its task has the number, or a text with it, e.g. `... #### 72`.
        answer_field: of the payload.
        mark: only what follows the last of these marks counts, and there the first number; a
            response without it has no answer. `"####"` for answers in the style of GSM8K.
        abs_tol: absolute tolerance.
        rel_tol: relative tolerance.
        percent: `share`: 15 % is 0.15; `points`: 15 % is 15.
        decimal_comma: numbers are written as `1.250,50`, in responses and in answers that are
            texts; an answer that is a number of JSON has its decimal point.

    Raises:
        InvalidError: the answer of the task is not a number.
    """
    target = _gold(field_of(item.task, answer_field), percent, decimal_comma)
    response = item.response[-_MAX_CHARS:]
    if mark:
        _, marked, response = response.rpartition(mark)
        numbers = _numbers(response, percent, decimal_comma) if marked else iter(())
        last = next(numbers, None)
    else:
        last = _last(response, percent=percent, decimal_comma=decimal_comma)
    if last is None:
        return unanswered(item, "no number")
    text, value = last
    tolerance = max(Fraction(abs_tol), Fraction(rel_tol) * abs(target))
    return Score(
        reward=float(abs(value - target) <= tolerance),
        parts={},
        raw_answer=text[:RAW_CHARS],
        normalised_answer=plain(value),
    )


def plain(value: Fraction) -> str:
    """A number as a decimal if it is one exactly, otherwise as a fraction: `0.75`, `1/3`."""
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        digits = max(digits, power)
    if rest != 1:
        return f"{value.numerator}/{value.denominator}"
    scaled = str(abs(value.numerator) * 10**digits // value.denominator).rjust(digits + 1, "0")
    sign = "-" if value < 0 else ""
    return sign + (f"{scaled[:-digits]}.{scaled[-digits:]}" if digits else scaled)


def _gold(value: Any, percent: Percent, decimal_comma: bool) -> Fraction:
    """The only number of a task's answer; beside another one or an operator it is no answer."""
    answer = final(as_text(value))
    has_comma = decimal_comma and isinstance(value, str)  # JSON has a decimal point
    numbers = list(_numbers(answer, percent, has_comma))
    marked = _WRAPPERS.sub(" ", _NUMBER.sub("#", _with_point(answer, has_comma)))
    is_single = len(numbers) == 1 and marked.count("#") == 1
    if not is_single or _OPERATORS.search(marked) or not isinstance(value, (str, int, float)):
        raise InvalidError(
            f"the task's answer {answer[:100]!r} is no number: it has to be a single one, with "
            "nothing but words beside it (the reward `math` compares formulas)"
        )
    return numbers[0][1]


def _last(text: str, *, percent: Percent, decimal_comma: bool) -> tuple[str, Fraction] | None:
    tail = text[-_TAIL_CHARS:]
    # The tail may begin within a number, which no later one is part of.
    start = _TAIL_CHARS // 2 if len(tail) < len(text) else 0
    for part, least in ((tail, start), (text, 0)):
        numbers = list(_numbers(part, percent, decimal_comma, least))
        if numbers:
            return numbers[-1]
    return None


def _numbers(
    text: str, percent: Percent, decimal_comma: bool, start: int = 0
) -> Iterator[tuple[str, Fraction]]:
    """Numbers of a text, as written and by value; those that no float could hold are left out."""
    for match in _NUMBER.finditer(_with_point(text, decimal_comma)):
        value = _value(match) if match.start() >= start else None
        if value is None:
            continue
        if match["scale"]:
            value *= _SCALES[match["scale"]]
        if match["percent"] and percent == "share":
            value /= 100
        yield match[0], -value if match["sign"] in {"-", "\u2212"} else value


def _with_point(text: str, decimal_comma: bool) -> str:
    for pattern, change in _SPELLINGS:
        text = pattern.sub(change, text)
    return text.translate({ord("."): ",", ord(","): "."}) if decimal_comma else text


def _value(match: re.Match[str]) -> Fraction | None:
    if match["top"]:
        return _ratio(Fraction(int(match["top"])), Fraction(int(match["bottom"])))
    value = _exact(match["number"])
    if value is None:
        return None
    if match["over"]:
        part = _ratio(Fraction(int(match["over"])), Fraction(int(match["under"])))
        return None if part is None else value + part
    if match["divisor"]:
        divisor = _exact(match["divisor"])
        return None if divisor is None else _ratio(value, divisor)
    return value


def _ratio(top: Fraction, bottom: Fraction) -> Fraction | None:
    return top / bottom if bottom else None


def _exact(text: str) -> Fraction | None:
    digits = re.sub(r"[,_\u00a0\u202f]", "", text)
    if len(digits) > _DIGITS:
        return None
    value = Decimal(digits)
    return Fraction(value) if abs(value.adjusted()) <= _DIGITS else None
