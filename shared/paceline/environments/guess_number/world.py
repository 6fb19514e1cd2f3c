"""A number to guess within a limit of turns; each guess is told whether it is too low or high."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from paceline.environments.guess_number.tasks import Scoring, check
from paceline.plugins import Message, Observation, StepResult
from paceline.types import Task

_NUMBER = re.compile(r"\d{1,9}")


class GuessNumber:
    """The last number of a turn is the guess; a turn without a number is a guess that failed.

    With the scoring `found` the number is worth 1 at any turn; with `guesses` it is worth 1 at the
    first, and less by `1 / max_turns` at each later one.
    """

    replayable = True

    def __init__(self, *, max_turns: int = 5, scoring: Scoring = "found", **of_tasks: Any) -> None:
        del of_tasks
        check(max_turns=max_turns, scoring=scoring)
        self._most_turns = self._limit = max_turns
        self._scoring = scoring
        self._turns = 0
        self._low = self._high = self._number = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        """Say from where to where."""
        del seed
        payload = json.loads(task.payload)
        self._low, self._high = int(payload["low"]), int(payload["high"])
        self._number = int(payload["number"])
        self._limit = min(self._most_turns, int(payload.get("max_turns", self._most_turns)))
        self._turns = 0
        limits = f"Guess my number from {self._low} to {self._high}."
        return _message(f"{limits} You have {self._limit} guesses.")

    async def step(self, action: str) -> StepResult:
        """Judge a guess."""
        self._turns += 1
        numbers = _NUMBER.findall(action)
        guess = int(numbers[-1]) if numbers else None
        if guess == self._number:
            return StepResult(Observation(), self._worth(), done=True)
        shown = _message(self._hint(guess))
        # Without a chat template nothing else ends the policy's line.
        shown = replace(shown, text=f"\n{shown.text}")
        return StepResult(shown, 0.0, done=self._turns >= self._limit)

    async def close(self) -> None:
        """Release nothing."""

    def _hint(self, guess: int | None) -> str:
        if guess is None:
            return f"Say a number from {self._low} to {self._high}."
        return "higher" if guess < self._number else "lower"

    def _worth(self) -> float:
        return 1.0 if self._scoring == "found" else 1.0 - (self._turns - 1) / self._limit


def _message(text: str) -> Observation:
    return Observation(messages=(Message("user", text),), text=f"{text}\n")
