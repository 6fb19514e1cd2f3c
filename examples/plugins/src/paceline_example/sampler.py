"""A sampler: the order of tasks, with a cursor that is saved with every admission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class InOrder:
    """Yields tasks in order; ignores `seed`, which is `tasks.seed` of the job."""

    def __init__(self, size: int, *, seed: int, epochs: int | None) -> None:
        del seed
        self._size, self._end = size, None if epochs is None else size * epochs
        self._drawn = 0

    def next(self) -> int | None:
        """Position of the next task; None when all epochs are over."""
        if self._drawn == self._end:
            return None
        self._drawn += 1
        return (self._drawn - 1) % self._size

    def state(self) -> dict[str, Any]:
        """Number of tasks drawn; small, since it is saved with every admission."""
        return {"drawn": self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._drawn = int(state["drawn"])
