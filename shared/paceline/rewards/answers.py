"""Expected answers and their normalised form, shared by the built-in rewards."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any

from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.platform.text import as_text
from paceline.plugins import RewardInput
from paceline.types import Score, Task

RAW_CHARS = 1000
"""Characters that a score quotes from the end of a response, where answers are."""


def expected(task: Task, field: str) -> str:
    """The answer in the task's payload, as text.

    Raises:
        InvalidError: the payload has no such field, or it is null.
    """
    value = field_of(task, field)
    if value is None:
        raise InvalidError(f"field {field!r} of task {task.task_id!r} is null; it has no answer")
    return as_text(value)


def whole(task: Task, field: str) -> str:
    """The `expected` answer, for a response that must equal it as a whole.

    Raises:
        InvalidError: also if it is a worked solution, which no response repeats.
    """
    answer = expected(task, field)
    if result := answer.partition("####")[2].strip():
        raise InvalidError(
            f"the task's answer is a solution that ends with '#### {result[:100]}', and it is "
            "compared as a whole; the rewards `math` and `numeric` take what follows the mark"
        )
    return answer


def field_of(task: Task, field: str) -> Any:
    """The JSON value of a field of the task's payload.

    Raises:
        InvalidError: the payload has no such field.
    """
    payload: Any = json.loads(task.payload)
    if not isinstance(payload, dict) or field not in payload:
        raise InvalidError(f"payload of task {task.task_id!r} has no field {field!r}")
    value: Any = payload[field]
    return value


def final(answer: str) -> str:
    """The text after the mark of a worked solution, as in GSM8K: `... #### 72` gives `72`."""
    return answer.rpartition("####")[2].strip()


def in_tags(response: str) -> str:
    """The text between the last `<answer>` and `</answer>`; without them the whole response."""
    _, begun, rest = response.rpartition("<answer>")
    answer, ended, _ = rest.partition("</answer>")
    return answer.strip() if begun and ended else response


def unanswered(
    item: RewardInput, detail: str, *, status: ScoreStatus = ScoreStatus.PARSE_ERROR
) -> Score:
    """The score of a response in which no answer can be found, or none that can be judged."""
    return Score(
        reward=0.0,
        parts={},
        status=status,
        raw_answer=item.response[-RAW_CHARS:],
        detail=detail,
    )


def normal(text: str, *, strip: bool, casefold: bool, numeric: bool) -> str | None:
    """The normalised answer for comparison; None if it has to be a number and is not."""
    if numeric:
        return number(text)
    if strip:
        text = text.strip()
    return text.casefold() if casefold else text


def number(text: str) -> str | None:
    """A decimal number without thousands separators and trailing zeros: `1,250.0` is `1250`."""
    try:
        value = Decimal(text.strip().replace(",", "").replace("_", ""))
    except InvalidOperation:
        return None
    if not value.is_finite() or abs(value.adjusted()) > 1000:
        return None
    plain = f"{value:f}"
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    return "0" if value == 0 else plain.removeprefix("+")
