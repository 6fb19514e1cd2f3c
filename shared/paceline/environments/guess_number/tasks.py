"""Numbers to guess, each within a range of its own."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from paceline.environments.splits import part_of
from paceline.errors import InvalidError
from paceline.platform.digest import Permutation, task_id
from paceline.types import Task

Scoring = Literal["found", "guesses"]
MAX_TURNS = 64
_MAX_NUMBER = 999_999
_ENVIRONMENT = "guess_number"
_HELDOUT_SHARE = 5  # one task in this many is held out
_FEWEST = 2 * _HELDOUT_SHARE


class GuessTasks:
    """All pairs of a number and a range of `span` numbers around it, within 0 to `most`.

    Each pair belongs to one split, whatever the seed, which picks the order.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        span: Annotated[int, Field(ge=2, le=_MAX_NUMBER + 1)] = 31,
        most: Annotated[int, Field(ge=1, le=_MAX_NUMBER)] = 99,
        max_turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 5,
        scoring: Scoring = "found",
        split: Literal["train", "heldout"] = "train",
        size: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        check(max_turns=max_turns, scoring=scoring)
        if not 1 <= most <= _MAX_NUMBER:
            raise InvalidError(f"tasks.options.most: {most}; allowed: 1 to {_MAX_NUMBER}")
        num_pairs = (most + 2 - span) * span
        if not 2 <= span <= most + 1 or num_pairs < _FEWEST:
            raise InvalidError(
                f"tasks.options.span: {span}; with most {most} allowed: 2 to {most + 1}, and at "
                f"least {_FEWEST} pairs of a range and a number in it"
            )
        self._start, whole = part_of(num_pairs, split, heldout_share=_HELDOUT_SHARE)
        self._span = span
        self._pairs = Permutation(num_pairs, ("split", span, most))
        self._order = Permutation(whole, (seed, "order"))
        self._size = whole if size is None else min(size, whole)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        low, above = divmod(self._pairs(self._start + self._order(position)), self._span)
        wanted = {"low": low, "high": low + self._span - 1, "number": low + above}
        payload = json.dumps(wanted)
        return Task(task_id(_ENVIRONMENT, payload, 0), _ENVIRONMENT, payload, domain=_ENVIRONMENT)


def check(*, max_turns: int, scoring: str) -> None:
    """Raise `InvalidError` for options of the world that are not allowed."""
    if not 1 <= max_turns <= MAX_TURNS:
        raise InvalidError(f"tasks.options.max_turns: {max_turns}; allowed: 1 to {MAX_TURNS}")
    if scoring not in ("found", "guesses"):
        raise InvalidError(f"tasks.options.scoring: {scoring!r}; allowed: found, guesses")
