"""Each task once per epoch, in an order that depends only on seed and epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidError
from paceline.platform.digest import Permutation


class Shuffle:
    """A pseudo-random permutation per epoch, in constant memory; its state is a cursor."""

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
        """Index of the next task; None after the last epoch."""
        if self._cursor == self._size:
            if self._is_last_epoch():
                return None
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._shuffled()
        self._cursor += 1
        return self._order(self._cursor - 1)

    def state(self) -> dict[str, Any]:
        """Epoch and position in it."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        epoch = int(state["epoch"])
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._shuffled()
        self._cursor = int(state["cursor"])

    def _is_last_epoch(self) -> bool:
        return self._epochs is not None and self._epoch + 1 >= self._epochs

    def _shuffled(self) -> Permutation:
        return Permutation(self._size, (self._seed, "epoch", self._epoch))
