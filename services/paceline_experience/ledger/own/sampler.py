"""A sampler that came with a job: its tasks are drawn ahead, so that no lease waits for it."""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.named import NamedPlugin
from paceline.errors import InvalidError
from paceline.isolation.code.generation.starts import pick_text
from paceline.plugins import MAX_CURSOR_BYTES, Pick
from paceline_experience.ledger.generation.memory import Memory
from paceline_experience.ledger.own.parts import OwnParts
from paceline_experience.ledger.own.plugin import UNREADABLE, OwnPlugin

AHEAD = 64  # tasks of a call
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DrawnTasks:
    """Tasks in their order, each with the sampler's state after it; `over`: no more follow."""

    picks: list[tuple[Pick, State]]
    over: bool


class OwnSampler(OwnPlugin):
    """A `Sampler` whose tasks were drawn before they are asked for.

    `state` is that after the last task that was taken, so what was drawn ahead and is lost with
    this process is drawn again. With another memory it would be drawn otherwise, and is forgotten.
    """

    def __init__(
        self,
        plugin: NamedPlugin,
        own: OwnParts,
        *,
        num_tasks: int,
        seed: int,
        epochs: int | None,
    ) -> None:
        super().__init__(plugin, own, args=(num_tasks,), given={"seed": seed, "epochs": epochs})
        self._num_tasks = num_tasks
        self._state: State = {}  # nothing was drawn
        self._drawn = deque[tuple[Pick, State]]()
        self._over = False

    def ready(self) -> bool:
        """Whether `next` has an answer; if there will soon be none, more is drawn."""
        if len(self._drawn) <= AHEAD // 2 and not self._over and not self.problem:
            self._ahead.begin()
        return bool(self._drawn) or self._over or bool(self.problem)

    def next(self) -> Pick | None:
        """The next task that was drawn; None after the last one. Only if `ready`.

        Raises:
            InvalidError: it has failed.
        """
        if self._drawn:
            pick, self._state = self._drawn.popleft()
            return pick
        if self.problem:
            raise InvalidError(self.problem)
        return None

    def state(self) -> State:
        """The state after the last task that was taken; empty: none was."""
        return self._state

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._state = dict(state)
        self._forget()

    def remember(self, memory: Memory) -> None:
        """See `LearningPart`."""
        super().remember(memory)
        self._forget()

    async def drawn(self, state: State, count: int, *, fresh: bool = False) -> DrawnTasks:
        """Up to `count` tasks after a state; `fresh`: by an instance that has drawn nothing.

        Raises:
            InvalidError: it has failed, or drawn what is no task.
            UnavailableError: it cannot be called for now.
        """
        answer = await self.ask("draw", state=state, count=count, fresh=fresh)
        try:
            raw: Any = answer["draws"]
            if len(raw) > count:
                raise ValueError(f"{len(raw)} tasks; {count} were asked for")
            picks = [(self._pick(*fields), _checked_state(after)) for *fields, after in raw]
            over = answer["over"] is True
            if not picks and not over:
                raise ValueError("no tasks, and more to come")
        except UNREADABLE as error:
            raise self.failed(error) from None
        return DrawnTasks(picks, over)

    def _where(self) -> Mapping[str, Any]:
        return {"state": self._state}

    def _pick(self, task: Any, variant: Any, meta: Any) -> Pick:
        if not 0 <= operator.index(task) < self._num_tasks:
            raise ValueError(f"task {task} of {self._num_tasks}")
        pick_text(variant, meta)
        return Pick(task, str(variant), dict(meta))

    async def _ask_ahead(self) -> bool:
        """Draw some; returns whether more are to be drawn."""
        since, memory = self._state_after_drawn(), self.memory
        found = await self.drawn(since, AHEAD)
        if memory != self.memory or since != self._state_after_drawn():
            return True  # forgotten meanwhile
        self._drawn.extend(found.picks)
        self._over = found.over
        self.on_answer()
        return False

    def _state_after_drawn(self) -> State:
        return self._drawn[-1][1] if self._drawn else self._state

    def _forget(self) -> None:
        self._drawn.clear()
        self._over = False


def _checked_state(state: Any) -> State:
    num_bytes = len(json.dumps(dict(state), allow_nan=False))
    if num_bytes > MAX_CURSOR_BYTES:
        raise ValueError(f"its state has {num_bytes} bytes; at most {MAX_CURSOR_BYTES} are allowed")
    return dict(state)
