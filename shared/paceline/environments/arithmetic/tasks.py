"""Sums, differences and products of small numbers."""

from __future__ import annotations

import json
from math import isqrt
from string import Formatter
from typing import Literal

from paceline.digest import Permutation, number, task_id
from paceline.errors import InvalidError
from paceline.types import Task

_ENVIRONMENT = "arithmetic"
_OPERATIONS = ("+", "-", "*")
_FIELDS = ("a", "op", "b")
_MAX_TEMPLATE_CHARS = 4096


class ArithmeticTasks:
    """A task source in which every pair of operands belongs to one split, whatever the seed.

    An operand has up to `digits` digits. Both orders of a pair belong to the same split; `seed`
    picks the order of tasks and of operands. Differences are never negative.
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
    ) -> None:
        _check(digits=digits, split=split, operations=operations, heldout_share=heldout_share)
        _check_template(template)
        if size is not None and size < 0:
            raise InvalidError(f"tasks.options.size: {size}; at least 0 is needed")
        self._seed = seed
        self._operations = tuple(operations)
        self._template = template
        self._numbers = 10**digits
        self._pairs = self._numbers * (self._numbers + 1) // 2
        num_train = self._pairs - round(self._pairs * heldout_share)
        self._start, end = (0, num_train) if split == "train" else (num_train, self._pairs)
        # A split's key must not depend on any option that may differ between train and heldout.
        self._splits = [
            Permutation(self._pairs, ("split", digits, name)) for name in self._operations
        ]
        whole = (end - self._start) * len(self._operations)
        self._order = Permutation(max(whole, 1), (seed, "order"))
        self._size = whole if size is None else min(size, whole)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        place = self._order(position)
        rank, which = divmod(place, len(self._operations))
        name, pair = self._operations[which], self._splits[which](self._start + rank)
        high = (isqrt(8 * pair + 1) - 1) // 2
        low = pair - high * (high + 1) // 2
        swapped = name != "-" and number(self._seed, place) & 1
        a, b = (low, high) if swapped else (high, low)
        answer = {"+": a + b, "-": a - b, "*": a * b}[name]
        question = self._template.format(a=a, op=name, b=b)
        payload = json.dumps({"question": question, "answer": str(answer)})
        identity = task_id(_ENVIRONMENT, payload, 0)
        return Task(identity, _ENVIRONMENT, payload, domain=f"arithmetic{name}")


def _check(
    *, digits: int, split: str, operations: tuple[str, ...] | list[str], heldout_share: float
) -> None:
    if not 1 <= digits <= 9:
        raise InvalidError(f"tasks.options.digits: {digits}; allowed: 1 to 9")
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
