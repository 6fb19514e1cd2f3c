"""Admits requests to decoding: as many as rows and memory allow, in order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenDemand:
    """The memory that a request needs, in tokens."""

    name: Hashable  # of the block that has its prefix, or will have it
    prefix: int  # size of that block, which others may share; 0: no block
    own: int  # columns of its row


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Memory that running requests use and that cannot be freed."""

    max_tokens: int
    rows: int
    columns: int  # maximum over the running rows
    blocks_in_use: frozenset[Hashable]  # names of the blocks that running rows read
    block_tokens: int  # tokens of those


def choose(
    demands: Iterable[TokenDemand], memory: CacheMemory, *, max_rows: int
) -> tuple[int, CacheMemory]:
    """How many requests to admit, and the memory used then; at least one if none runs."""
    rows, columns, block_tokens, blocks_in_use = (
        memory.rows,
        memory.columns,
        memory.block_tokens,
        set(memory.blocks_in_use),
    )
    chosen = 0
    for demand in demands:
        new_columns = max(columns, demand.own)
        new_blocks = block_tokens + (0 if demand.name in blocks_in_use else demand.prefix)
        if rows >= max_rows or (rows and (rows + 1) * new_columns + new_blocks > memory.max_tokens):
            break
        rows, columns, block_tokens, chosen = rows + 1, new_columns, new_blocks, chosen + 1
        blocks_in_use.add(demand.name)
    return chosen, CacheMemory(
        memory.max_tokens, rows, columns, frozenset(blocks_in_use), block_tokens
    )
