"""Cells of a square grid, and shortest ways between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

Cell = tuple[int, int]
"""Column from the left and row from below, both from 0."""
MOVES: dict[str, Cell] = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}


def way(start: Cell, goal: Cell, *, width: int, walls: Collection[Cell]) -> list[str] | None:
    """The moves of a shortest way, always the same one; None: there is no way."""
    came: dict[Cell, tuple[Cell, str]] = {}
    seen, reached = {start}, deque([start])
    while reached:
        cell = reached.popleft()
        if cell == goal:
            return _moves(came, start, goal)
        for name, neighbour in neighbours(cell, width=width, walls=walls):
            if neighbour not in seen:
                seen.add(neighbour)
                came[neighbour] = (cell, name)
                reached.append(neighbour)
    return None


def neighbours(cell: Cell, *, width: int, walls: Collection[Cell]) -> Iterator[tuple[str, Cell]]:
    """Moves that do not end at a wall or the edge, with the cells that they lead to."""
    for name, (right, up) in MOVES.items():
        beside = cell[0] + right, cell[1] + up
        if 0 <= beside[0] < width and 0 <= beside[1] < width and beside not in walls:
            yield name, beside


def _moves(came: dict[Cell, tuple[Cell, str]], start: Cell, cell: Cell) -> list[str]:
    moves = list[str]()
    while cell != start:
        cell, name = came[cell]
        moves.append(name)
    return moves[::-1]
