"""A sampler and an allocator of a job, which the ledger calls in its sealed process.

Both are the classes that an installed plug-in would be.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from paceline.plugins import Context, GroupOutcome, OpenGroup, Pick, Start

_TRIES = 8  # tasks that a draw looks at


class Unsolved:
    """Draws at random, and mostly passes over tasks that all of their group solved last time.

    What it draws follows from the seed, the number of draws and its memory, so it goes on with the
    same tasks after a restart.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        epochs: int | None,
        skip: Annotated[float, Field(ge=0, le=1)] = 0.8,
        solved: float = 0.9,
    ) -> None:
        """`skip`: chance to pass over a task whose mean reward was at least `solved`."""
        self._size, self._seed, self._skip, self._threshold = size, seed, skip, solved
        self._end = None if epochs is None else epochs * size
        self._drawn = 0
        self._solved: Mapping[str, Any] = {}

    def next(self) -> Pick | None:
        """The next task."""
        if self._end is not None and self._drawn >= self._end:
            return None
        chance = random.Random(f"{self._seed}/{self._drawn}")
        self._drawn += 1
        task = chance.randrange(self._size)
        for _ in range(_TRIES):
            if str(task) not in self._solved or chance.random() >= self._skip:
                break
            task = chance.randrange(self._size)
        return Pick(task)

    def state(self) -> dict[str, Any]:
        """How many tasks were drawn."""
        return {"drawn": self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._drawn = int(state["drawn"])

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Pass over the tasks that the memory has."""
        self._solved = memory

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        """Note which tasks are solved, and which are no longer."""
        changed: dict[str, Any] = {}
        for each in outcomes:
            if each.rewards:
                mean = sum(each.rewards) / len(each.rewards)
                changed[str(each.task)] = True if mean >= self._threshold else None
        return changed


class SecondWave:
    """Starts a part of each group, and the rest only if no episode of the first part was good."""

    def __init__(
        self,
        *,
        group_size: int,
        first: Annotated[int, Field(ge=2)] = 4,
        good: float = 0.8,
    ) -> None:
        """`first`: episodes of the first wave; `good`: a reward with which there is no second."""
        self._size, self._first, self._good = group_size, min(first, group_size), good

    def start(self, pick: Pick, context: Context) -> Sequence[Start]:
        """The first wave."""
        return [Start()] * self._first

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """The rest of the group, once."""
        if group.waves > 1 or max(group.rewards) >= self._good:
            return []
        return [Start(variant="again")] * (self._size - self._first)
