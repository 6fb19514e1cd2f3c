"""Grids with a start, a key, a door, and walls."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from paceline.environments.key_door.grid import Cell, way
from paceline.environments.splits import part_of
from paceline.errors import InvalidError
from paceline.platform.digest import Permutation, task_id
from paceline.types import Task

Scoring = Literal["found", "shaped"]
MAX_TURNS = 64
MAX_WIDTH = 16
_ENVIRONMENT = "key_door"
_HELDOUT_SHARE = 5  # one task in this many is held out


class KeyDoorTasks:
    """All places of start, key and door in a grid of `width` times `width` cells.

    Each belongs to one split, whatever the seed, which picks the order. Walls are a function of
    the three places and cut neither key nor door off. The domain `key_door/6` says that six moves
    are enough.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        width: Annotated[int, Field(ge=2, le=MAX_WIDTH)] = 4,
        walls: Annotated[int, Field(ge=0, le=MAX_WIDTH)] = 0,
        max_turns: Annotated[int, Field(ge=2, le=MAX_TURNS)] = 12,
        scoring: Scoring = "found",
        split: Literal["train", "heldout"] = "train",
        size: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        check(max_turns=max_turns, scoring=scoring)
        if not 2 <= width <= MAX_WIDTH:
            raise InvalidError(f"tasks.options.width: {width}; allowed: 2 to {MAX_WIDTH}")
        if not 0 <= walls < width:
            raise InvalidError(
                f"tasks.options.walls: {walls}; with width {width} allowed: 0 to {width - 1}"
            )
        cells = width * width
        num_places = cells * (cells - 1) * (cells - 2)
        self._start, whole = part_of(num_places, split, heldout_share=_HELDOUT_SHARE)
        self._width, self._walls = width, walls
        self._places = Permutation(num_places, ("split", width))
        self._order = Permutation(whole, (seed, "order"))
        self._size = whole if size is None else min(size, whole)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        index = self._places(self._start + self._order(position))
        start, key, door = self._distinct(index)
        walls, moves = self._add_walls(start, key, door, index)
        wanted = {
            "width": self._width,
            "start": start,
            "key": key,
            "door": door,
            "walls": walls,
        }
        payload = json.dumps(wanted)
        identity = task_id(_ENVIRONMENT, payload, 0)
        return Task(identity, _ENVIRONMENT, payload, domain=f"{_ENVIRONMENT}/{moves}")

    def _distinct(self, index: int) -> tuple[Cell, Cell, Cell]:
        """Three cells, all different."""
        cells = self._width * self._width
        index, third = divmod(index, cells - 2)
        first, second = divmod(index, cells - 1)
        second += second >= first
        for taken in sorted((first, second)):
            third += third >= taken
        return self._cell(first), self._cell(second), self._cell(third)

    def _cell(self, number: int) -> Cell:
        return number % self._width, number // self._width

    def _add_walls(self, start: Cell, key: Cell, door: Cell, index: int) -> tuple[list[Cell], int]:
        """Walls, and the moves of the shortest way around them."""
        walls = list[Cell]()
        moves = self._moves(start, key, door, walls)
        assert moves is not None, "nothing is cut off without walls"
        order = Permutation(self._width * self._width, ("walls", self._width, index))
        for number in range(self._width * self._width if self._walls else 0):
            cell = self._cell(order(number))
            if len(walls) == self._walls or cell in (start, key, door):
                continue
            longer = self._moves(start, key, door, [*walls, cell])
            if longer is not None:
                walls, moves = [*walls, cell], longer
        return walls, moves

    def _moves(self, start: Cell, key: Cell, door: Cell, walls: list[Cell]) -> int | None:
        there = way(start, key, width=self._width, walls=walls)
        back = way(key, door, width=self._width, walls=walls)
        return None if there is None or back is None else len(there) + len(back)


def check(*, max_turns: int, scoring: str) -> None:
    """Raise `InvalidError` for options of the world that are not allowed."""
    if not 2 <= max_turns <= MAX_TURNS:
        raise InvalidError(f"tasks.options.max_turns: {max_turns}; allowed: 2 to {MAX_TURNS}")
    if scoring not in ("found", "shaped"):
        raise InvalidError(f"tasks.options.scoring: {scoring!r}; allowed: found, shaped")
