"""Splits sequences into micro-batches of bounded size in which no sequence attends to another.

There are two layouts. `padded`: rows of similar length under a causal mask; padding comes last, so
no real token attends to it. `packed`: one row, positions restart at each sequence. Attention over
a packed row costs the square of its whole length, so the cheaper layout depends on the lengths.
A sequence ends with its last policy token, which is a target but never an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline_trainer.columns import Columns, Ints

Layout = Literal["padded", "packed"]
MIN_GAP = 16  # tokens of padding in a row that are cheaper than one more micro-batch


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating point operations of a forward pass: per token, and per pair of tokens."""

    token: float
    pair: float


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Policy tokens of some sequences, flat [P]."""

    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequences: Tensor  # in [0, num_sequences)
    num_sequences: int
    temperature: Tensor | float  # a number if it is the same for all
    weights: Tensor | None  # None: all one
    keys: Tensor  # see `Columns.keys`
    select: Ints  # indices of the policy tokens in the columns


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one forward pass."""

    input_ids: Tensor  # [rows, length]
    position_ids: Tensor | None  # packed only
    hidden_indices: (
        Tensor  # [P] row-major index of the hidden state that predicts each policy token
    )
    tokens: PolicyTokens


def plan(
    columns: Columns, rows: Ints, *, budget: int, cost: Cost, layouts: Sequence[Layout]
) -> tuple[Layout, list[Ints]]:
    """Choose the cheapest layout; returns it and the sequences per micro-batch, longest first."""
    used = _used(columns)[rows]
    order = rows[np.argsort(-used, kind="stable")]
    best: tuple[float, Layout, list[Ints]] | None = None
    for layout in layouts:
        parts = _split(_used(columns)[order], budget, layout)
        chunks = [order[a:b] for a, b in parts]
        cost_of_layout = sum(_price(_used(columns)[chunk], cost, layout) for chunk in chunks)
        if best is None or cost_of_layout < best[0]:
            best = (cost_of_layout, layout, chunks)
    if best is None:
        raise ValueError("no layout to choose from")
    return best[1], best[2]


def _used(columns: Columns) -> Ints:
    """Number of input tokens per sequence: all before its last policy token."""
    if not columns.num_sequences:
        return np.zeros(0, np.int64)
    return columns.positions[columns.policy_starts[1:] - 1]


def _split(used: Ints, budget: int, layout: Layout) -> list[tuple[int, int]]:
    """Split sequences in order of falling length into runs of at most `budget` tokens."""
    parts: list[tuple[int, int]] = []
    start = size = 0
    for end, length in enumerate(used.tolist()):
        longest = int(used[start])
        new_size = (end + 1 - start) * longest if layout == "padded" else size + length
        sparse = layout == "padded" and longest - length > max(longest // 2, MIN_GAP)
        if end > start and (new_size > budget or sparse):
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
    tokens = policy_tokens(columns, chunk, device)
    starts = columns.token_starts[chunk]
    if layout == "padded":
        inputs = _padded(columns.tokens, starts, used)
        position_ids = None
        offsets = np.arange(len(chunk)) * inputs.shape[1]
    else:
        inputs = columns.tokens[_ranges(starts, used)][None]
        position_ids = _ranges(np.zeros_like(used), used)[None]
        offsets = np.cumsum(used) - used
    sequences = np.repeat(np.arange(len(chunk)), columns.policy_counts[chunk])
    return MicroBatch(
        input_ids=_tensor(inputs, device),
        position_ids=None if position_ids is None else _tensor(position_ids, device),
        hidden_indices=_tensor(offsets[sequences] + columns.positions[tokens.select] - 1, device),
        tokens=tokens,
    )


def policy_tokens(columns: Columns, rows: Ints, device: torch.device) -> PolicyTokens:
    """The policy tokens of some sequences, in this order."""
    counts = columns.policy_counts[rows]
    select = _ranges(columns.policy_starts[rows], counts)
    sequences = np.repeat(np.arange(len(rows)), counts)
    inside = columns.token_starts[rows][sequences] + columns.positions[select]
    return PolicyTokens(
        targets=_tensor(columns.tokens[inside], device),
        behaviour=_tensor(columns.behaviour[select], device),
        advantages=_tensor(columns.advantages[select], device),
        sequences=_tensor(sequences, device),
        num_sequences=len(rows),
        temperature=_uniform(columns.temperatures[rows], sequences, device),
        weights=_weights(columns.weights[rows], sequences, device),
        keys=_tensor(columns.keys[select], device),
        select=select,
    )


def idle(device: torch.device) -> MicroBatch:
    """A micro-batch without targets, for a rank that has fewer than the others."""
    empty = torch.zeros(0, device=device)
    indices = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device),
        position_ids=None,
        hidden_indices=indices,
        tokens=PolicyTokens(
            targets=indices,
            behaviour=empty,
            advantages=empty,
            sequences=indices,
            num_sequences=0,
            temperature=1.0,
            weights=None,
            keys=indices,
            select=np.zeros(0, np.int64),
        ),
    )


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenated ranges: `count` numbers from each `start`."""
    shift = starts - (np.cumsum(counts) - counts)
    return np.repeat(shift, counts) + np.arange(int(counts.sum()))


def _padded(tokens: Ints, starts: Ints, used: Ints) -> Ints:
    column = np.arange(int(used.max()))
    indices = np.minimum(starts[:, None] + column, len(tokens) - 1)
    return np.where(column < used[:, None], tokens[indices], 0)


def _tensor(values: Ints | np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


def _uniform(temperatures: np.ndarray, sequences: Ints, device: torch.device) -> Tensor | float:
    first = float(temperatures[0]) if len(temperatures) else 1.0
    if (temperatures == temperatures[0]).all():
        return first
    return _tensor(temperatures[sequences], device)


def _weights(weights: np.ndarray, sequences: Ints, device: torch.device) -> Tensor | None:
    return None if (weights == 1.0).all() else _tensor(weights[sequences], device)
