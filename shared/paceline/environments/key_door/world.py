"""A grid in which the door opens only to whoever has fetched the key before."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from paceline.environments.key_door.grid import MOVES, Cell, neighbours
from paceline.environments.key_door.tasks import Scoring, check
from paceline.plugins import Message, Observation, StepResult
from paceline.types import Task

_MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)
_KEY_WORTH = 0.5


class KeyDoor:
    """The last direction of a turn is the move; a turn without a direction moves nowhere.

    With the scoring `found` only the door is worth 1; with `shaped` fetching the key is worth 0.5
    and the door the rest.
    """

    replayable = True

    def __init__(self, *, max_turns: int = 12, scoring: Scoring = "found", **of_tasks: Any) -> None:
        del of_tasks
        check(max_turns=max_turns, scoring=scoring)
        self._limit = max_turns
        self._key_worth = _KEY_WORTH if scoring == "shaped" else 0.0
        self._turns, self._width = 0, 0
        self._at: Cell = (0, 0)
        self._door: Cell = (0, 0)
        self._key: Cell | None = None  # None: fetched
        self._walls: frozenset[Cell] = frozenset()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Say where everything is."""
        del seed
        payload = json.loads(task.payload)
        self._at, self._key, self._door = (_cell(payload[n]) for n in ("start", "key", "door"))
        self._width, self._turns = int(payload["width"]), 0
        self._walls = frozenset(map(_cell, payload["walls"]))
        walls = ", ".join(_place(_cell(cell)) for cell in payload["walls"])
        return _message(
            f"Take the key to the door of a {self._width} x {self._width} grid: up, down, left or "
            f"right, one move a turn; up adds to the second number. Key at {_place(self._key)}, "
            f"door at {_place(self._door)}, {f'walls at {walls}, ' if walls else ''}"
            f"you at {_place(self._at)}."
        )

    async def step(self, action: str) -> StepResult:
        """Move."""
        self._turns += 1
        moves = _MOVE.findall(action)
        feedback, worth = (
            self._moved(moves[-1].lower()) if moves else ("up, down, left or right?", 0.0)
        )
        if self._key is None and self._at == self._door:
            return StepResult(Observation(), 1.0 - self._key_worth, done=True)
        # Without a chat template nothing else ends the policy's line.
        shown = _message(f"{feedback} at {_place(self._at)}".lstrip())
        shown = replace(shown, text=f"\n{shown.text}")
        return StepResult(shown, worth, done=self._turns >= self._limit)

    async def close(self) -> None:
        """Release nothing."""

    def _moved(self, move: str) -> tuple[str, float]:
        """The feedback on a move besides the new place, and its reward."""
        beside = dict(neighbours(self._at, width=self._width, walls=self._walls)).get(move)
        if beside is None:
            return "wall", 0.0
        self._at = beside
        if self._at == self._key:
            self._key = None
            return "key", self._key_worth
        return ("locked" if self._at == self._door else ""), 0.0


def _cell(cell: list[int]) -> Cell:
    return int(cell[0]), int(cell[1])


def _place(cell: Cell) -> str:
    return f"{cell[0]} {cell[1]}"


def _message(text: str) -> Observation:
    return Observation(messages=(Message("user", text),), text=f"{text}\n")
