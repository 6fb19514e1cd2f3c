"""The world of `copying`, used by environment workers: one instance per episode."""

from __future__ import annotations

import json
from typing import Any

from paceline.plugins import Message, Observation, StepResult
from paceline.types import Task


class Copying:
    """Shows the digits and takes one answer."""

    replayable = True  # the same task, seed and actions lead to the same state

    def __init__(self, **options: Any) -> None:
        del options  # these configure the tasks; the world needs none
        self._answer = ""

    async def reset(self, task: Task, seed: int) -> Observation:
        """Show the digits, as a message for chat models and as text for others."""
        del seed
        payload = json.loads(task.payload)
        self._answer = payload["answer"]
        return Observation((Message("user", payload["question"]),), text=payload["question"])

    async def step(self, action: str) -> StepResult:
        """Take the answer and end the episode."""
        return StepResult(Observation(), reward=float(action == self._answer), done=True)

    async def close(self) -> None:
        """Nothing to release."""
