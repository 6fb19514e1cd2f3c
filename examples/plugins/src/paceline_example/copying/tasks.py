"""Tasks of `copying`, used by experience."""

from __future__ import annotations

import json
from typing import Literal

from paceline.errors import InvalidError
from paceline.platform.digest import Permutation, task_id
from paceline.types import Task


class CopyingTasks:
    """All numbers with the given number of digits, shuffled by `seed`; a tenth is held out."""

    def __init__(
        self, *, seed: int, digits: int = 2, split: Literal["train", "heldout"] = "train"
    ) -> None:
        if not 1 <= digits <= 9:
            raise InvalidError(f"tasks.options.digits: {digits}; allowed: 1 to 9")
        heldout = 10 ** (digits - 1)
        self._digits, self._first = digits, 0 if split == "heldout" else heldout
        self._size = heldout if split == "heldout" else 10**digits - heldout
        self._order = Permutation(self._size, (seed, "copying", split))

    def __len__(self) -> int:
        """Number of tasks per epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        text = str(self._first + self._order(position)).zfill(self._digits)
        payload = json.dumps({"question": f"{text}=", "answer": text})
        return Task(task_id("copying", payload, 0), "copying", payload, domain="copying")
