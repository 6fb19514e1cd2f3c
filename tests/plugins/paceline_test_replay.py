"""A replay that stores and offers anything, and what it does wrong where it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.platform.digest import number
from paceline.plugins import Context, FinishedGroup, Guest, Stored


class AnyReplay:
    """Any episodes are stored, and any of them join in place of any others, as its seed says.

    `deed`: what it does wrong.
    """

    def __init__(self, *, seed: int = 0, deed: str = "") -> None:
        self._seed, self._deed = seed, deed

    def keep(self, group: FinishedGroup, context: Context) -> Sequence[int]:
        if self._deed == "keep":
            raise ZeroDivisionError
        return self._some("keep", group.task, len(group.rewards))

    def offer(self, group: FinishedGroup, stored: Sequence[Stored], context: Context) -> Any:
        if self._deed == "crowd":
            return [Guest(0, replaces=place) for place in range(len(group.rewards))]
        if self._deed == "number":
            return [0]
        size = len(group.rewards)
        leave = iter(self._some("leave", len(stored), size)[: size - 1])
        return [Guest(place, next(leave, None)) for place in self._some("join", size, len(stored))]

    def _some(self, about: str, which: int, size: int) -> list[int]:
        bits = number(about, self._seed, which)
        return [place for place in range(size) if bits >> (place % 60) & 1]
