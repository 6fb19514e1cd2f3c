"""Small environments, some of which misbehave on request.

Tests find them by the names in `tests/plugins`, where a distribution installs them.
"""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.plugins import EnvironmentPlugin, Message, Observation, StepResult, TaskSource
from paceline.types import Task

_LOOK_S = 0.05
_SPREAD = 0.5  # of the logarithm of a slow call's duration


class Talking:
    """Asks `turns` questions; each answer has the reward `worth`."""

    def __init__(
        self, *, turns: int = 3, worth: float = 1.0, replayable: bool = True, **options: Any
    ) -> None:
        del options
        self.replayable = replayable
        self._turns = turns
        self._worth = worth
        self._heard = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        """Ask the first question."""
        del task, seed
        return _say("q0")

    async def step(self, action: str) -> StepResult:
        """The next question."""
        del action
        self._heard += 1
        done = self._heard >= self._turns
        return StepResult(_say(f"q{self._heard}"), reward=self._worth, done=done)

    async def close(self) -> None:
        """Release nothing."""


class Quiz(Talking):
    """Asks for the sum of a task repeatedly; checking each answer takes `pause_s`."""

    def __init__(self, *, turns: int = 3, pause_s: float = 0.02, **options: Any) -> None:
        super().__init__(turns=turns, **options)
        self._pause_s = pause_s

    async def step(self, action: str) -> StepResult:
        """The next question."""
        await asyncio.sleep(self._pause_s)
        return await super().step(action)


class Marking(Talking):
    """Asks `turns` questions; an answer that begins with a digit below 5 has the reward 1.

    With a `gate`, every second task waits after its first answer until that file exists.
    """

    def __init__(self, *, gate: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._gate = Path(gate) if gate else None

    async def reset(self, task: Task, seed: int) -> Observation:
        """Ask the first question."""
        if zlib.crc32(task.task_id.encode()) % 2:
            self._gate = None
        return await super().reset(task, seed)

    async def step(self, action: str) -> StepResult:
        """The next question."""
        while self._heard and self._gate is not None and not self._gate.exists():
            await asyncio.sleep(_LOOK_S)
        right = action[:1] in set("01234")
        return replace(await super().step(action), reward=float(right))


class Desk(Talking):
    """Slow calls, and an agent that decides when it is done: after its first action at random.

    The number of turns is lognormal around `median`, at most `turns`; a call takes `call_s` on
    average. Both depend on what was said, so episodes of a group differ.
    """

    def __init__(
        self,
        *,
        turns: int = 30,
        median: float = 3.0,
        spread: float = 1.0,
        call_s: float = 0.4,
        **options: Any,
    ) -> None:
        super().__init__(turns=turns, **options)
        self._most, self._median, self._spread = turns, median, spread
        self._call_s = call_s

    async def step(self, action: str) -> StepResult:
        """The next question, after a while."""
        chance = random.Random(zlib.crc32(action.encode()))
        if not self._heard:
            drawn = self._median * math.exp(self._spread * chance.gauss(0.0, 1.0))
            self._turns = min(max(round(drawn), 1), self._most)
        await asyncio.sleep(
            self._call_s * math.exp(_SPREAD * chance.gauss(0.0, 1.0) - _SPREAD**2 / 2)
        )
        return await super().step(action)


def quiz_tasks(*, seed: int, turns: int = 3, pause_s: float = 0.0, **options: Any) -> TaskSource:
    """Sums for `Quiz`; the number of turns does not affect them."""
    del turns, pause_s
    return ArithmeticTasks(seed, **options)


def talking_tasks(*, seed: int, **options: Any) -> TaskSource:
    """Sums for worlds that ignore their task."""
    del options
    return ArithmeticTasks(seed)


class Hanging(Talking):
    """Never answers."""

    async def step(self, action: str) -> StepResult:
        """Hang."""
        await asyncio.Event().wait()
        return await super().step(action)


class Crashing(Talking):
    """Raises an unexpected exception."""

    async def step(self, action: str) -> StepResult:
        """Crash."""
        raise ZeroDivisionError("a plug-in with a bug")


def _say(text: str) -> Observation:
    return Observation(messages=(Message("user", text),), text=text)


def _plugin(world: str, tasks: str = "talking_tasks") -> EnvironmentPlugin:
    return EnvironmentPlugin(tasks=f"{__name__}:{tasks}", world=f"{__name__}:{world}")


TALKING, HANGING, CRASHING = _plugin("Talking"), _plugin("Hanging"), _plugin("Crashing")
MARKING = _plugin("Marking")
QUIZ = _plugin("Quiz", "quiz_tasks")
DESK = _plugin("Desk")
