"""Chains of sums that `arithmetic` would ask one by one."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.errors import InvalidError
from paceline.platform.digest import task_id
from paceline.types import Task

MAX_LENGTH = 64
_ENVIRONMENT = "chain"


class ChainTasks:
    """Each `length` successive sums of the source `arithmetic` with the same options and seed.

    So each sum occurs once in an epoch, and held-out chains have held-out sums only.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        length: Annotated[int, Field(ge=1, le=MAX_LENGTH)] = 4,
        digits: Annotated[int, Field(ge=1, le=9)] = 2,
        operations: tuple[str, ...] | list[str] = ("+",),
        heldout_share: float = 0.2,
        split: Literal["train", "heldout"] = "train",
        size: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise InvalidError(f"tasks.options.length: {length}; allowed: 1 to {MAX_LENGTH}")
        self._sums = ArithmeticTasks(
            seed, digits=digits, split=split, operations=operations, heldout_share=heldout_share
        )
        whole = len(self._sums) // length
        if not whole:
            raise InvalidError(
                f"tasks.options.length: {length}; the split has {len(self._sums)} sums"
            )
        self._length = length
        self._size = whole if size is None else min(size, whole)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        first = position * self._length
        sums: list[dict[str, Any]] = [
            json.loads(self._sums[first + index].payload) for index in range(self._length)
        ]
        asked = {
            "questions": [question["question"] for question in sums],
            "answers": [question["answer"] for question in sums],
        }
        payload = json.dumps(asked)
        identity = task_id(_ENVIRONMENT, payload, 0)
        return Task(identity, _ENVIRONMENT, payload, domain=f"chain/{self._length}")
