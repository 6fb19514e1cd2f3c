"""An environment of one's own: guess a number, with a hint after each guess."""

from __future__ import annotations

import json
import random

from paceline.plugins import EnvironmentPlugin
from paceline.types import Task


class Numbers:
    """As many tasks as asked for, each a number to guess."""

    def __init__(self, *, seed: int, most: int = 9, size: int = 500) -> None:
        chance = random.Random(seed)
        self._numbers = [chance.randint(0, most) for _ in range(size)]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> dict[str, int]:
        """What becomes the payload of a task."""
        return {"number": self._numbers[position], "position": position}


class Guess:
    """Three guesses; each is told whether it is too low or too high."""

    replayable = True

    def __init__(self, *, most: int = 9, size: int = 500) -> None:
        del size
        self._most = most
        self._left = 3
        self._number = 0

    def reset(self, task: Task, seed: int) -> str:
        """The first observation."""
        del seed
        self._number = int(json.loads(task.payload)["number"])
        return f"0+{self._most}="

    def step(self, action: str) -> tuple[str, float, bool]:
        """The next observation, the reward, and whether the episode is over."""
        self._left -= 1
        try:
            guess = int(action)
        except ValueError:
            return "", 0.0, True
        if guess == self._number:
            return "", 1.0, True
        hint = "+" if guess < self._number else "-"
        return f"{guess}{hint}1=", 0.0, self._left == 0


ENVIRONMENT = EnvironmentPlugin(tasks="world:Numbers", world="world:Guess")
