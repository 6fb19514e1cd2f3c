"""Samplers that compare a few tasks at a time and draw the best of them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidError
from paceline.platform.digest import Permutation, number
from paceline.plugins import Context, GroupOutcome

STEP = "step"  # key of the memory: the trainer's step at the last observation


class Tournament(ABC):
    """Draws from windows of `width` tasks the one of the highest worth, as far as it is known.

    The windows of a pass are disjoint parts of a permutation, so that no task is drawn twice in a
    pass of size / width draws; the state is the number of draws. A draw costs `width` look-ups,
    however many tasks there are.
    """

    def __init__(
        self, size: int, *, seed: int, epochs: int | None, width: int, uniform: float
    ) -> None:
        """`epochs` times `size` tasks are drawn; a share of `uniform` whatever is known of them.

        Raises:
            InvalidError: there are no tasks.
        """
        if size < 1:
            raise InvalidError("tasks: the task source is empty; nothing can be sampled from it")
        self._size, self._width, self._uniform = size, width, uniform
        self._seed = seed
        self._end = None if epochs is None else epochs * size
        self._num_windows = -(-size // width)
        self._drawn = 0
        self._pass = -1
        self._order = Permutation(size, (seed, "pass", 0))
        self._memory: Mapping[str, Any] = {}

    def next(self) -> int | None:
        """Position of the next task; None after the last epoch."""
        if self._end is not None and self._drawn >= self._end:
            return None
        candidates = self._candidates(self._drawn)
        chance = random.Random(number(self._seed, "draw", self._drawn))
        self._drawn += 1
        if chance.random() < self._uniform:
            return candidates[0]
        now = int(self._memory.get(STEP, 0))
        worths = self.worths([self._memory.get(str(c)) for c in candidates], now, chance)
        return candidates[worths.index(max(worths))]

    def state(self) -> dict[str, Any]:
        """The number of draws."""
        return {"drawn": self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._drawn = int(state["drawn"])

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Draw with this memory from now on."""
        self._memory = memory

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        """Learn about the tasks of these groups; failed groups say nothing."""
        changed: dict[str, Any] = {STEP: context.step}
        for outcome in outcomes:
            if outcome.rewards:
                key = str(outcome.task)
                known = changed.get(key, context.memory.get(key))
                changed[key] = self.learned(known, outcome, context.step)
        return changed

    @abstractmethod
    def worths(self, known: Sequence[Any], now: int, chance: random.Random) -> list[float]:
        """Worth of each task as of step `now`; `known` is its stored entry, or None."""

    @abstractmethod
    def learned(self, known: Any, outcome: GroupOutcome, now: int) -> Any:
        """The entry of a task to store after one of its groups, at most 4 KiB of JSON."""

    def _candidates(self, draw: int) -> list[int]:
        turn, window = divmod(draw, self._num_windows)
        if turn != self._pass:
            self._pass, self._order = turn, Permutation(self._size, (self._seed, "pass", turn))
        start = window * self._width
        return [self._order(at) for at in range(start, min(start + self._width, self._size))]
