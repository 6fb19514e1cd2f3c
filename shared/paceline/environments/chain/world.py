"""One sum per turn; the reward is 1 if all are right, and 0 at the first that is not."""

from __future__ import annotations

import json
from typing import Any

from paceline.plugins import Message, Observation, StepResult
from paceline.types import Task


class Chain:
    """A reply is right if, without surrounding white space, it is the answer of its sum.

    A policy that solves a sum with probability p earns the reward with p to the power of `length`.
    """

    replayable = True

    def __init__(self, **options: Any) -> None:
        del options
        self._questions: list[str] = []
        self._answers: list[str] = []
        self._solved = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        """Ask the first sum."""
        del seed
        payload = json.loads(task.payload)
        self._questions = [str(question) for question in payload["questions"]]
        self._answers = [str(answer) for answer in payload["answers"]]
        self._solved = 0
        return self._question()

    async def step(self, action: str) -> StepResult:
        """Compare the reply, and ask the next sum."""
        if action.strip() != self._answers[self._solved]:
            return StepResult(Observation(), 0.0, done=True)
        self._solved += 1
        if self._solved == len(self._answers):
            return StepResult(Observation(), 1.0, done=True)
        return StepResult(self._question(), 0.0, done=False)

    async def close(self) -> None:
        """Release nothing."""

    def _question(self) -> Observation:
        question = self._questions[self._solved]
        # Without a chat template nothing else ends the policy's line.
        text = f"\n{question}" if self._solved else question
        return Observation(messages=(Message("user", question),), text=text)
