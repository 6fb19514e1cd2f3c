"""Sums, differences and products of small numbers."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, count
from math import isqrt
from string import Formatter
from typing import Literal

from paceline.environments.arithmetic.levels import MAX_DIGITS, SumLevel, levels_of
from paceline.errors import InvalidError
from paceline.platform.digest import Permutation, number, task_id
from paceline.types import Task

_ENVIRONMENT = "arithmetic"
_OPERATIONS = ("+", "-", "*")
_FIELDS = ("a", "op", "b")
_MAX_TEMPLATE_CHARS = 4096
_MIXED = 10_000  # tasks of a mixture, unless the job has a `size`
_DRAWS = 10_000  # until a level is taken to be empty


class ArithmeticTasks:
    """A task source in which every pair of operands belongs to one split, whatever the seed.

    An operand has up to `digits` digits. Both orders of a pair belong to the same split; `seed`
    picks the order of tasks and of operands. Differences are never negative.

    `mixture` has shares of levels instead (`{2-plain: 0.3, 2-carry: 0.4, 3: 0.3}`): sums whose
    larger operand has that many digits, without or with a carry, or either. They are drawn, so
    that some may occur more than once. `wrong_labels` is the share of training tasks whose stored
    answer is wrong, always the same ones; answers of held-out tasks are right.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        digits: int = 2,
        split: Literal["train", "heldout"] = "train",
        operations: tuple[str, ...] | list[str] = ("+",),
        heldout_share: float = 0.2,
        size: int | None = None,
        template: str = "{a}{op}{b}=",
        mixture: dict[str | int, float] | None = None,
        wrong_labels: float = 0.0,
    ) -> None:
        _check(digits=digits, split=split, operations=operations, heldout_share=heldout_share)
        _check_template(template)
        if size is not None and size < 0:
            raise InvalidError(f"tasks.options.size: {size}; at least 0 is needed")
        if not 0.0 <= wrong_labels < 1.0:
            raise InvalidError(f"tasks.options.wrong_labels: {wrong_labels}; allowed: 0 to below 1")
        self._seed = seed
        self._operations = tuple(operations)
        self._template = template

        def split_of(digits: int) -> Split:
            return Split(digits, split, self._operations, heldout_share, wrong_labels)

        self._sums, self._mixed = split_of(digits), None
        whole = self._sums.size * len(self._operations)
        if mixture is not None:
            levels, shares = levels_of(mixture, self._operations)
            whole = _MIXED if size is None else size
            self._mixed = _Mixed(seed, levels, shares, whole, split_of)
        self._order = Permutation(max(whole, 1), (seed, "order"))
        self._size = whole if size is None else min(size, whole)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        place, level = self._order(position), ""
        if self._mixed is None:
            rank, which = divmod(place, len(self._operations))
            problem = self._sums.at(rank, which)
        else:
            level, problem = self._mixed.at(place)
        swapped = problem.operation != "-" and number(self._seed, place) & 1
        a, b = (problem.low, problem.high) if swapped else (problem.high, problem.low)
        question = self._template.format(a=a, op=problem.operation, b=b)
        payload = json.dumps({"question": question, "answer": str(problem.answer)})
        identity = task_id(_ENVIRONMENT, payload, 0)
        domain = f"arithmetic{problem.operation}{level and '/'}{level}"
        return Task(identity, _ENVIRONMENT, payload, domain=domain)


@dataclass(frozen=True, slots=True)
class Sum:
    """A pair of operands, the smaller one first, and the answer that is stored."""

    low: int
    high: int
    operation: str
    answer: int


class Split:
    """The pairs of up to `digits` digits that are in a split, for each operation."""

    def __init__(
        self,
        digits: int,
        split: str,
        operations: tuple[str, ...],
        heldout_share: float,
        wrong_labels: float,
    ) -> None:
        numbers = 10**digits
        pairs = numbers * (numbers + 1) // 2
        num_train = pairs - round(pairs * heldout_share)
        self._start, end = (0, num_train) if split == "train" else (num_train, pairs)
        self.size = end - self._start
        self.operations = operations
        # A split's key must not depend on any option that may differ between train and heldout.
        self._splits = [Permutation(pairs, ("split", digits, name)) for name in operations]
        self._num_wrong = round(wrong_labels * num_train) if split == "train" else 0
        self._wrong = [Permutation(max(num_train, 1), ("wrong", digits, n)) for n in operations]

    def at(self, rank: int, which: int) -> Sum:
        """The pair of a rank below `size`, for the operation of that index."""
        name, pair = self.operations[which], self._splits[which](self._start + rank)
        high = (isqrt(8 * pair + 1) - 1) // 2
        low = pair - high * (high + 1) // 2
        answer = {"+": high + low, "-": high - low, "*": high * low}[name]
        if self._num_wrong and self._wrong[which](rank) < self._num_wrong:
            answer = _wrong(answer, number("wrong", name, pair))
        return Sum(low, high, name, answer)


def _wrong(answer: int, draw: int) -> int:
    """An answer that is off by 1 to 9, and not negative."""
    off = 1 + draw % 9
    return answer - off if draw >> 32 & 1 and answer >= off else answer + off


class _Mixed:
    """Draws of levels by their shares, and of a sum of the level."""

    def __init__(
        self,
        seed: int,
        levels: list[SumLevel],
        shares: list[float],
        size: int,
        split_of: Callable[[int], Split],
    ) -> None:
        self._seed, self._levels = seed, levels
        self._ends = [round(size * end) for end in accumulate(shares)]
        self._ends[-1] = size
        self._splits = [split_of(level.digits) for level in levels]
        self._num_operations = len(self._splits[0].operations)
        for index, level in enumerate(levels):
            if all(self._draw(index, ("any", n)) is None for n in range(_DRAWS)):
                raise InvalidError(
                    f"tasks.options.mixture: {level.name!r}: none of the split's tasks is of this "
                    "level; leave it out or change heldout_share"
                )

    def at(self, place: int) -> tuple[str, Sum]:
        """The level's name and the sum at a place in the order."""
        index = bisect_right(self._ends, place)
        for attempt in count():
            problem = self._draw(index, (place, attempt))
            if problem is not None:
                return self._levels[index].name, problem
        raise AssertionError

    def _draw(self, index: int, key: object) -> Sum | None:
        """A sum of the split; None if it is of another level."""
        split, level = self._splits[index], self._levels[index]
        if not split.size:
            return None
        rank = number(self._seed, "rank", level.name, key) % split.size
        which = number(self._seed, "operation", level.name, key) % self._num_operations
        problem = split.at(rank, which)
        return problem if level.takes(problem.high, problem.low, problem.operation) else None


def _check(
    *, digits: int, split: str, operations: tuple[str, ...] | list[str], heldout_share: float
) -> None:
    if not 1 <= digits <= MAX_DIGITS:
        raise InvalidError(f"tasks.options.digits: {digits}; allowed: 1 to {MAX_DIGITS}")
    if split not in ("train", "heldout"):
        raise InvalidError(f"tasks.options.split: {split!r}; allowed: train, heldout")
    unknown = [name for name in operations if name not in _OPERATIONS]
    if unknown or not operations or len(set(operations)) < len(operations):
        raise InvalidError(
            f"tasks.options.operations: {unknown or list(operations)[:9]}; allowed: "
            f"{', '.join(_OPERATIONS)}, each once"
        )
    if not 0.0 <= heldout_share < 1.0:
        raise InvalidError(f"tasks.options.heldout_share: {heldout_share}; allowed: 0 to below 1")


def _check_template(template: str) -> None:
    """Reject format specs: a width (`{a:60000000}`) would make a task arbitrarily long."""
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise InvalidError(
            f"tasks.options.template: has {len(template)} characters; "
            f"at most {_MAX_TEMPLATE_CHARS} are allowed"
        )
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise InvalidError(f"tasks.options.template: {template!r}: {error}") from None
    for _, field, spec, conversion in parts:
        if field is not None and (field not in _FIELDS or spec or conversion):
            raise InvalidError(
                f"tasks.options.template: {template!r}; allowed in braces: "
                f"{', '.join(_FIELDS)}, without a format"
            )
