"""A single-turn world that compares the reply with the expected answer as text."""

from __future__ import annotations

import json
from typing import Any

from paceline.plugins import Message, Observation, StepResult
from paceline.types import Task

_NOTHING = Observation()


class Arithmetic:
    """Single turn: reward 1 if the reply without surrounding white space is the answer."""

    replayable = True

    def __init__(self, **options: Any) -> None:
        del options
        self._answer = ""

    async def reset(self, task: Task, seed: int) -> Observation:
        """Show the question."""
        del seed
        payload = json.loads(task.payload)
        self._answer = str(payload["answer"])
        question = str(payload["question"])
        return Observation(messages=(Message("user", question),), text=question)

    async def step(self, action: str) -> StepResult:
        """Compare the reply."""
        return StepResult(_NOTHING, reward=float(action.strip() == self._answer), done=True)

    async def close(self) -> None:
        """Release nothing."""
