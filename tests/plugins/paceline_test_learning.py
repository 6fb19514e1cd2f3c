"""A sampler that learns, allocators, and what they do wrong where they are told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.methods.xrpo.corpus import remembered, seeded
from paceline.plugins import Context, GroupOutcome, Limits, OpenGroup, Pick, Start
from paceline_experience.ledger.task_cursor import stable_seed


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


class AnyWaves:
    """Waves of any size that continue any siblings; a function of its seed and what it is asked."""

    def __init__(self, *, group_size: int, seed: int = 0, deed: str = "") -> None:
        self._size, self._seed, self._deed = group_size, seed, deed

    def _number(self, below: int, *about: object) -> int:
        return stable_seed(self._seed, *about) % below

    def start(self, pick: Pick, context: Context) -> list[Start]:
        del context
        if self._deed == "start":
            raise ZeroDivisionError
        if self._deed == "child":
            return [Start()]
        count = 600 if self._deed == "crowd" else 1 + self._number(2 * self._size, pick.task)
        return [Start(limits=Limits(max_tokens=1 + i % 3), meta={"i": i}) for i in range(count)]

    def more(self, group: OpenGroup, context: Context) -> list[Start]:
        del context
        if self._deed == "more":
            raise ZeroDivisionError
        if self._deed == "child":
            return [Start(variant="next", parent=(0, 3))] if group.waves == 1 else []
        count = self._number(3, "more", group.pick.task, group.waves)
        if self._deed == "orphan":
            return [Start(parent=(99, 1))]
        parents = [each.index for each in group.episodes]
        return [
            Start(variant="next", parent=(parents[i % len(parents)], 3 + i)) for i in range(count)
        ]

    def enough(self, group: OpenGroup) -> bool:
        if self._deed:
            return False
        finished = tuple(each.index for each in group.episodes)
        return self._number(4, "enough", group.pick.task, finished) == 0


class Depth:
    """A second wave for tasks that half of the first one did not solve (as DARS), and a memory.

    `width` of the first wave; tasks that were solved before get a single episode.
    """

    def __init__(self, *, group_size: int, width: int = 2) -> None:
        self._size, self._width = group_size, width
        self._solved: Mapping[str, Any] = {}

    def start(self, pick: Pick, context: Context) -> list[Start]:
        del context
        return [Start()] * (1 if self._solved.get(str(pick.task)) else self._width)

    def more(self, group: OpenGroup, context: Context) -> list[Start]:
        del context
        rewards = group.rewards
        if group.waves > 1 or len(rewards) == 1 or sum(rewards) * 2 >= len(rewards):
            return []
        return [Start(variant="deep", limits=Limits(temperature=1.5))] * self._size

    def enough(self, group: OpenGroup) -> bool:
        del group
        return False

    def remember(self, memory: Mapping[str, Any]) -> None:
        self._solved = memory

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        del context
        return {str(each.task): True for each in outcomes if 1.0 in each.rewards}


class Seeding:
    """Tasks that nobody has solved get a second wave, which sees solved examples (as XRPO)."""

    def __init__(self, *, group_size: int, success: float = 0.5, far: bool = False) -> None:
        self._size, self._success, self._far = group_size, success, far
        self._memory: Mapping[str, Any] = {}

    def start(self, pick: Pick, context: Context) -> list[Start]:
        del pick, context
        return [Start()] * self._size

    def more(self, group: OpenGroup, context: Context) -> list[Start]:
        del context
        if group.waves > 1 or max(group.rewards) > self._success:
            return []
        if self._far:
            return [Start("seeded", tasks=(10**9,))]
        return list(seeded(self._memory, self._size))

    def enough(self, group: OpenGroup) -> bool:
        del group
        return False

    def remember(self, memory: Mapping[str, Any]) -> None:
        self._memory = memory

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        return remembered(context.memory, outcomes, success=self._success)
