"""Splits sequences into micro-batches of bounded size in which no sequence attends to another.

There are two layouts. `padded`: rows of similar length under a causal mask; padding comes last, so
no real token attends to it. `tree`: one row without padding, in which a prefix that sequences have
in common occurs once; needs `TreeAttention`.
A sequence ends with its last policy token, which is a target but never an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline_trainer.columns import Columns, Ints
from paceline_trainer.step.attention import TreeAttention
from paceline_trainer.step.flash_tree import to_device
from paceline_trainer.step.tree import prefix_order, prefix_tree, ranges

Layout = Literal["padded", "tree"]
Planned = tuple[float, list[Ints]]  # price, and the sequences of each micro-batch
# A key and its value take about a sixteenth of what a layer keeps of a token for its gradient.
KEYS_PER_TOKEN = 16
# Tokens that are worth a segment of their own: on a GPU, each level of a tree costs launches.
LEAST_SHARED = {"cpu": 1, "cuda": 32}
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
    replaced: Tensor | None = None  # bool, see `Columns.replaced`; None: none


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one forward pass."""

    input_ids: Tensor  # [rows, length]
    position_ids: Tensor | None  # of a tree
    hidden_indices: (
        Tensor  # [P] row-major index of the hidden state that predicts each policy token
    )
    tokens: PolicyTokens
    tree: TreeAttention | None = None


def plan(
    columns: Columns, rows: Ints, *, budget: int, cost: Cost, layouts: Sequence[Layout]
) -> tuple[Layout, list[Ints]]:
    """Choose the cheapest layout; returns it and the sequences of each micro-batch."""
    best: tuple[float, Layout, list[Ints]] | None = None
    for layout in layouts:
        price, chunks = _PLANS[layout](columns, rows, budget, cost)
        if best is None or price < best[0]:
            best = (price, layout, chunks)
    if best is None:
        raise ValueError("no layout to choose from")
    return best[1], best[2]


def _plan_padded(columns: Columns, rows: Ints, budget: int, cost: Cost) -> Planned:
    used = _used(columns)[rows]
    order = np.argsort(-used, kind="stable")
    parts = _split_padded(used[order], budget)
    price = 0.0
    for start, end in parts:
        length = int(used[order[start]])
        price += (end - start) * length * (cost.token + cost.pair * length)
    return price, [rows[order[start:end]] for start, end in parts]


def _plan_tree(columns: Columns, rows: Ints, budget: int, cost: Cost) -> Planned:
    used = _used(columns)[rows]
    order, common = prefix_order(columns.tokens, columns.token_starts[rows], used)
    used = used[order]
    parts = _split_tree(used, common, budget)
    new = used - common
    for start, _ in parts:
        new[start] = used[start]
    price = float((new * (cost.token + cost.pair * used)).sum())
    return price, [rows[order[start:end]] for start, end in parts]


_PLANS: dict[Layout, Callable[[Columns, Ints, int, Cost], Planned]] = {
    "padded": _plan_padded,
    "tree": _plan_tree,
}


def _used(columns: Columns) -> Ints:
    """Number of input tokens per sequence: all before its last policy token."""
    if not columns.num_sequences:
        return np.zeros(0, np.int64)
    return columns.positions[columns.policy_starts[1:] - 1]


def _split_padded(used: Ints, budget: int) -> list[tuple[int, int]]:
    """Split sequences in order of falling length into runs of at most `budget` tokens."""
    parts: list[tuple[int, int]] = []
    start = 0
    for end, length in enumerate(used.tolist()):
        longest = int(used[start])
        sparse = longest - length > max(longest // 2, MIN_GAP)
        if end > start and ((end + 1 - start) * longest > budget or sparse):
            parts.append((start, end))
            start = end
    return [*parts, (start, len(used))] if len(used) else []


def _split_tree(used: Ints, common: Ints, budget: int) -> list[tuple[int, int]]:
    """Split sequences in prefix order into runs of at most `budget` distinct tokens.

    Attention repeats the keys and values of whole paths, so these are bounded too.
    """
    parts: list[tuple[int, int]] = []
    start = size = keys = 0
    for end, (length, shared) in enumerate(zip(used.tolist(), common.tolist(), strict=True)):
        new = length - shared if end > start else length
        full = size + new > budget or keys + length > budget * KEYS_PER_TOKEN
        if end > start and full:
            parts.append((start, end))
            start, size, keys, new = end, 0, 0, length
        size += new
        keys += length
    return [*parts, (start, len(used))] if len(used) else []


def assemble(columns: Columns, chunk: Ints, layout: Layout, device: torch.device) -> MicroBatch:
    """The tensors of one micro-batch; a tree lays the sequences out in prefix order."""
    if layout == "tree":
        return _assemble_tree(columns, chunk, device)
    used = _used(columns)[chunk]
    tokens = policy_tokens(columns, chunk, device)
    inputs = _padded(columns.tokens, columns.token_starts[chunk], used)
    sequences = np.repeat(np.arange(len(chunk)), columns.policy_counts[chunk])
    indices = sequences * inputs.shape[1] + columns.positions[tokens.select] - 1
    return MicroBatch(to_device(inputs, device), None, to_device(indices, device), tokens)


def _assemble_tree(columns: Columns, chunk: Ints, device: torch.device) -> MicroBatch:
    used, starts = _used(columns)[chunk], columns.token_starts[chunk]
    order, common = prefix_order(columns.tokens, starts, used)
    chunk, used, starts = chunk[order], used[order], starts[order]
    tree = prefix_tree(used, common, least=LEAST_SHARED.get(device.type, 1))
    tokens = policy_tokens(columns, chunk, device)
    inputs, positions = (np.zeros(tree.num_tokens, np.int64) for _ in range(2))
    sequences = np.repeat(np.arange(len(chunk)), used)
    inside = ranges(np.zeros_like(used), used)
    places = tree.places[sequences, inside]
    inputs[places] = columns.tokens[starts[sequences] + inside]
    positions[places] = inside
    owners = np.repeat(np.arange(len(chunk)), columns.policy_counts[chunk])
    indices = tree.places[owners, columns.positions[tokens.select] - 1]
    return MicroBatch(
        input_ids=to_device(inputs[None], device),
        position_ids=to_device(positions[None], device),
        hidden_indices=to_device(indices, device),
        tokens=tokens,
        tree=TreeAttention(tree, device),
    )


def policy_tokens(columns: Columns, rows: Ints, device: torch.device) -> PolicyTokens:
    """The policy tokens of some sequences, in this order."""
    counts = columns.policy_counts[rows]
    select = ranges(columns.policy_starts[rows], counts)
    sequences = np.repeat(np.arange(len(rows)), counts)
    inside = columns.token_starts[rows][sequences] + columns.positions[select]
    return PolicyTokens(
        targets=to_device(columns.tokens[inside], device),
        behaviour=to_device(columns.behaviour[select], device),
        advantages=to_device(columns.advantages[select], device),
        sequences=to_device(sequences, device),
        num_sequences=len(rows),
        temperature=_uniform(columns.temperatures[rows], sequences, device),
        weights=_weights(columns.weights[rows], sequences, device),
        keys=to_device(columns.keys[select], device),
        select=select,
        replaced=_any(columns.replaced[rows], sequences, device),
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


def _padded(tokens: Ints, starts: Ints, used: Ints) -> Ints:
    column = np.arange(int(used.max()))
    indices = np.minimum(starts[:, None] + column, len(tokens) - 1)
    return np.where(column < used[:, None], tokens[indices], 0)


def _uniform(temperatures: np.ndarray, sequences: Ints, device: torch.device) -> Tensor | float:
    if not len(temperatures):  # a rank may have no sequence of an update
        return 1.0
    if (temperatures == temperatures[0]).all():
        return float(temperatures[0])
    return to_device(temperatures[sequences], device)


def _any(flags: np.ndarray, sequences: Ints, device: torch.device) -> Tensor | None:
    return to_device(flags[sequences], device) if flags.any() else None


def _weights(weights: np.ndarray, sequences: Ints, device: torch.device) -> Tensor | None:
    return None if (weights == 1.0).all() else to_device(weights[sequences], device)
