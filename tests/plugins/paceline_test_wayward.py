"""A sampler that does what a test tells it to, once the test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar


class Wayward:
    """Draws tasks in turn; `deeds` has what it does instead, by the name of the method."""

    deeds: ClassVar[dict[str, Callable[[], Any]]] = {}

    def __init__(self, size: int, *, seed: int, epochs: int | None = None) -> None:
        del seed, epochs
        self._size, self._drawn = size, 0

    def next(self) -> int | None:
        if "next" in self.deeds:
            return self.deeds["next"]()
        self._drawn += 1
        return self._drawn % self._size

    def state(self) -> dict[str, Any]:
        return self.deeds["state"]() if "state" in self.deeds else {"drawn": self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        if "load" in self.deeds:
            self.deeds["load"]()
        self._drawn = int(state["drawn"])
