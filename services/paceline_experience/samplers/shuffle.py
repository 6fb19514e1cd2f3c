"""Every task once per epoch, in an order that depends on seed and epoch only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.errors import InvalidError

_WORD = (1 << 32) - 1


class Shuffle:
    """Order = f(seed, epoch); the state is where it stands."""

    def __init__(self, size: int, *, seed: int = 0, epochs: int | None = None) -> None:
        if size < 1:
            raise InvalidError("tasks: the task source is empty; nothing can be sampled from it")
        self._size = size
        self._seed = seed
        self._epochs = epochs
        self._epoch = 0
        self._cursor = 0
        self._order = self._shuffled()

    def next(self) -> int | None:
        """Position of the next task; None when all epochs are over."""
        if self._cursor == self._size:
            if self._last():
                return None
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._shuffled()
        self._cursor += 1
        return int(self._order[self._cursor - 1])

    def state(self) -> dict[str, Any]:
        """Epoch and place in it."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        epoch = int(state["epoch"])
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._shuffled()
        self._cursor = int(state["cursor"])

    def _last(self) -> bool:
        return self._epochs is not None and self._epoch + 1 >= self._epochs

    def _shuffled(self) -> Any:
        # RandomState's stream is frozen by numpy, so that an order outlives upgrades.
        words = [self._seed & _WORD, (self._seed >> 32) & _WORD, self._epoch & _WORD]
        return np.random.RandomState(words).permutation(self._size)
