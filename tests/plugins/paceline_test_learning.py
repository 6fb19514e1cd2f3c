"""A sampler that learns, and fails where it is told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plugins import Context, GroupOutcome, Pick


class Weakest:
    """Draws the tasks with the lowest mean reward so far, as of the last batch, in turn.

    The memory counts how often each draw was observed, and what each task got. `deed`: what it does
    wrong when it observes.
    """

    def __init__(
        self, size: int, *, seed: int, epochs: int | None = None, width: int = 4, deed: str = ""
    ) -> None:
        del seed, epochs
        self._size, self._width, self._deed = size, width, deed
        self._drawn = 0
        self._weakest: list[int] = []

    def next(self) -> Pick:
        self._drawn += 1
        task = self._weakest[self._drawn % len(self._weakest)]
        return Pick(task, variant=f"v{task}", meta={"n": self._drawn})

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])

    def remember(self, memory: Mapping[str, Any]) -> None:
        def worth(task: int) -> tuple[float, int]:
            total, count = memory.get(f"task{task}", (0.0, 0))
            return (total / count if count else 0.5, task)

        self._weakest = sorted(range(self._size), key=worth)[: self._width]

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        if self._deed == "raise":
            raise ZeroDivisionError
        if self._deed == "swell":
            return {"big": "x" * 5000}
        changed: dict[str, Any] = {}

        def old(key: str, default: Any) -> Any:
            return changed.get(key, context.memory.get(key, default))

        for each in outcomes:
            assert each.variant == f"v{each.task}"
            seen = f"seen{each.meta['n']}"
            changed[seen] = old(seen, 0) + 1
            key = f"failed {each.failed}" if each.failed else f"task{each.task}"
            total, count = old(key, (0.0, 0))
            changed[key] = total + sum(each.rewards), count + max(len(each.rewards), 1)
        return changed
