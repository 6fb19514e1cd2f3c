"""Sequences to micro-batches of bounded size, with no way for one sequence to see another.

Two layouts. `padded`: rows of similar length under a causal mask; padding comes last, so nothing
real sees it. `packed`: one row, positions restart at each sequence. Attention over a packed row
costs the square of its whole length, so the cheaper layout depends on the lengths.
A sequence ends with its last policy token, which is predicted but never fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline_trainer.take import Columns, Ints

Layout = Literal["padded", "packed"]
MIN_GAP = 16  # tokens of padding in a row that are cheaper than one more micro-batch


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating point operations of a forward pass: per token, and per pair of tokens."""

    token: float
    pair: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass needs. Policy tokens are flat, [P]."""

    input_ids: Tensor  # [rows, length]
    position_ids: Tensor | None  # packed only
    where: Tensor  # [P] row-major place of the hidden state that predicts each policy token
    targets: Tensor  # [P]
    behaviour: Tensor
    advantages: Tensor
    sequences: Tensor  # [P] in [0, num_sequences)
    num_sequences: int
    temperature: Tensor | float  # one number if it is the same for all
    weights: Tensor | None  # [P]; None: all one
    select: Ints  # [P] places of the policy tokens in the columns


def plan(
    columns: Columns, rows: Ints, *, budget: int, cost: Cost, layouts: Sequence[Layout]
) -> tuple[Layout, list[Ints]]:
    """The cheapest layout and the sequences of each micro-batch, longest first."""
    used = _used(columns)[rows]
    order = rows[np.argsort(-used, kind="stable")]
    best: tuple[float, Layout, list[Ints]] | None = None
    for layout in layouts:
        parts = _split(_used(columns)[order], budget, layout)
        chunks = [order[a:b] for a, b in parts]
        price = sum(_price(_used(columns)[chunk], cost, layout) for chunk in chunks)
        if best is None or price < best[0]:
            best = (price, layout, chunks)
    if best is None:
        raise ValueError("no layout to choose from")
    return best[1], best[2]


def _used(columns: Columns) -> Ints:
    """Tokens to feed of each sequence: up to the one before its last policy token."""
    if not columns.num_sequences:
        return np.zeros(0, np.int64)
    return columns.positions[columns.policy_starts[1:] - 1]


def _split(used: Ints, budget: int, layout: Layout) -> list[tuple[int, int]]:
    """Runs of sequences, ordered by falling length, of at most `budget` tokens each."""
    parts: list[tuple[int, int]] = []
    start = size = 0
    for end, length in enumerate(used.tolist()):
        longest = int(used[start])
        grown = (end + 1 - start) * longest if layout == "padded" else size + length
        sparse = layout == "padded" and longest - length > max(longest // 2, MIN_GAP)
        if end > start and (grown > budget or sparse):
            parts.append((start, end))
            start, size = end, 0
        size += length
    return [*parts, (start, len(used))] if len(used) else []


def _price(used: Ints, cost: Cost, layout: Layout) -> float:
    count, length = (len(used), int(used.max())) if layout == "padded" else (1, int(used.sum()))
    return count * length * (cost.token + cost.pair * length)


def assemble(columns: Columns, chunk: Ints, layout: Layout, device: torch.device) -> MicroBatch:
    """The tensors of one micro-batch."""
    used = _used(columns)[chunk]
    counts = columns.policy_counts[chunk]
    select = _ranges(columns.policy_starts[chunk], counts)
    starts = columns.token_starts[chunk]
    sequences = np.repeat(np.arange(len(chunk)), counts)
    if layout == "padded":
        inputs = _padded(columns.tokens, starts, used)
        position_ids = None
        firsts = np.arange(len(chunk)) * inputs.shape[1]
    else:
        inputs = columns.tokens[_ranges(starts, used)][None]
        position_ids = _ranges(np.zeros_like(used), used)[None]
        firsts = np.cumsum(used) - used
    inside = columns.positions[select]
    return MicroBatch(
        input_ids=_tensor(inputs, device),
        position_ids=None if position_ids is None else _tensor(position_ids, device),
        where=_tensor(firsts[sequences] + inside - 1, device),
        targets=_tensor(columns.tokens[starts[sequences] + inside], device),
        behaviour=_tensor(columns.behaviour[select], device),
        advantages=_tensor(columns.advantages[select], device),
        sequences=_tensor(sequences, device),
        num_sequences=len(chunk),
        temperature=_uniform(columns.temperatures[chunk], sequences, device),
        weights=_weights(columns.weights[chunk], sequences, device),
        select=select,
    )


def idle(device: torch.device) -> MicroBatch:
    """A micro-batch that trains nothing, for a rank that has fewer of them than the others."""
    empty = torch.zeros(0, device=device)
    indices = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device),
        position_ids=None,
        where=indices,
        targets=indices,
        behaviour=empty,
        advantages=empty,
        sequences=indices,
        num_sequences=0,
        temperature=1.0,
        weights=None,
        select=np.zeros(0, np.int64),
    )


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """`start, start + 1, ...`, `count` of them, one after another."""
    shift = starts - (np.cumsum(counts) - counts)
    return np.repeat(shift, counts) + np.arange(int(counts.sum()))


def _padded(tokens: Ints, starts: Ints, used: Ints) -> Ints:
    column = np.arange(int(used.max()))
    places = np.minimum(starts[:, None] + column, len(tokens) - 1)
    return np.where(column < used[:, None], tokens[places], 0)


def _tensor(values: Ints | np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


def _uniform(temperatures: np.ndarray, sequences: Ints, device: torch.device) -> Tensor | float:
    first = float(temperatures[0])
    if (temperatures == temperatures[0]).all():
        return first
    return _tensor(temperatures[sequences], device)


def _weights(weights: np.ndarray, sequences: Ints, device: torch.device) -> Tensor | None:
    return None if (weights == 1.0).all() else _tensor(weights[sequences], device)
