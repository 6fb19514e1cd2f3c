"""Finished episodes as they are listed, and ranges of numbers to find them by."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.enums import Purpose, ScoreStatus
from paceline.errors import InvalidError
from paceline.types import Trajectory

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "": operator.eq,
}
_BOUND = re.compile(r"(<=|>=|<|>|=|)\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)", re.IGNORECASE)
_MOST_BOUNDS = 8


@dataclass(frozen=True, slots=True)
class ListedEpisode:
    """A finished episode whose trajectory is still stored."""

    group_id: str
    index: int
    attempt: int
    task_id: str
    purpose: Purpose
    step: int
    """The row of the history that counts it; for a dropped one, the step when it was dropped."""
    reward: float
    parts: dict[str, float] = field(default_factory=dict[str, float])
    status: ScoreStatus = ScoreStatus.OK
    truncated: bool = False
    advantage: float | None = None
    """Mean over its policy tokens; null: it was not trained, or it is not known any more."""
    age: int | None = None
    """Steps from its oldest policy token to its batch; null for evals."""
    tokens: int = 0
    policy_tokens: int = 0
    turns: int = 0
    oldest_version: int = -1
    newest_version: int = -1
    answer: str = ""
    """Normalised; the first 200 characters, as of `text`."""
    text: str = ""
    """Text of the last turn."""
    dropped: str = ""
    """Why it was not trained; empty: it was, or it is of an eval."""
    total_s: float = 0.0
    trajectory: Trajectory | None = None

    @property
    def failed(self) -> bool:
        """Whether it was cut off, or could not be scored as it should."""
        return self.truncated or self.status is not ScoreStatus.OK


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Bounds that a number has to keep; none: every number does."""

    bounds: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str, *, name: str) -> NumberRange:
        """Parse bounds separated by commas: `<0.5`, `>=0.1,<0.9`, `1`.

        Raises:
            InvalidError: a bound is not a comparison with a finite number.
        """
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        if len(parts) > _MOST_BOUNDS:
            raise InvalidError(f"{name}: has {len(parts)} bounds; at most {_MOST_BOUNDS}")
        return cls(tuple(_bound(part, name) for part in parts))

    def holds(self, value: float | None) -> bool:
        """Whether a number keeps all bounds; one that is not known keeps none."""
        if value is None:
            return not self.bounds
        return all(_COMPARE[sign](value, number) for sign, number in self.bounds)


def _bound(text: str, name: str) -> tuple[str, float]:
    match = _BOUND.fullmatch(text)
    try:
        number = float(match[2]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise InvalidError(f"{name}: {text!r} is no bound; write '<0.5', '>=0.1,<0.9' or '1'")
    return match[1], number
