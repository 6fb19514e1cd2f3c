"""Who may join now: as many as there are rows and memory for, in order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Want:
    """What a request needs, in tokens."""

    name: Hashable  # of the block that has its prefix, or will have it
    prefix: int  # size of that block, whoever else reads it; 0: needs none
    own: int  # columns of its row


@dataclass(frozen=True, slots=True)
class Memory:
    """What is taken and cannot be given back."""

    most: int  # tokens
    rows: int
    columns: int  # the most that a running row needs
    held: frozenset[Hashable]  # blocks that running rows read
    blocks: int  # tokens of those


def choose(wants: Iterable[Want], memory: Memory, *, most_rows: int) -> tuple[int, Memory]:
    """How many may join, and what is taken then; at least one if nothing runs."""
    rows, columns, blocks, held = memory.rows, memory.columns, memory.blocks, set(memory.held)
    chosen = 0
    for want in wants:
        wider = max(columns, want.own)
        more = blocks + (0 if want.name in held else want.prefix)
        if rows >= most_rows or (rows and (rows + 1) * wider + more > memory.most):
            break
        rows, columns, blocks, chosen = rows + 1, wider, more, chosen + 1
        held.add(want.name)
    return chosen, Memory(memory.most, rows, columns, frozenset(held), blocks)
