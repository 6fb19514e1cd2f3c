"""Key/value caches that any Hugging Face causal LM can write to.

Legend of shapes: R rows, H heads, L columns (positions), D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Where the keys and values of a context's first `length` tokens are."""

    block: Block
    row: int
    length: int

    def pair(self, layer: int) -> Pair:
        """Keys and values, [H, length, D] each."""
        keys, values = self.block.store[layer]
        return keys[self.row, :, : self.length], values[self.row, :, : self.length]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows of a `SlotCache` whose contexts begin with one prefix."""

    rows: slice | Tensor
    prefix: Prefix


class Layered(Cache):
    """A cache that keeps a pair of tensors for each layer."""

    groups: Sequence[Group] = ()

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.store: dict[int, Pair] = {}  # layer -> keys and values, [R, H, L, D] each
        self.layer = 0  # whose `update` was the last: attention comes right after it

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Callers give positions and mask, so nobody may derive them from this."""
        return 0


class Block(Layered):
    """Contexts of one prefill, padded on the right; filled in one go or piece by piece."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns
        self.done = 0  # columns that all layers have

    @property
    def size(self) -> int:
        """Tokens for which it takes memory."""
        return self.rows * self.columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> Pair:
        """Append columns; the keys and values of all so far."""
        self.layer = layer_idx
        new = (key_states, value_states)
        if key_states.shape[2] == self.columns:
            # A view may be part of something larger, which it would keep alive.
            self.store[layer_idx] = (key_states.contiguous(), value_states.contiguous())
            return self.store[layer_idx]
        end = self.done + key_states.shape[2]
        for kept, some in zip(self._room(layer_idx, new), new, strict=True):
            kept[:, :, self.done : end] = some
        keys, values = self.store[layer_idx]
        return keys[:, :, :end], values[:, :, :end]

    def adopt(self, prefix: Prefix) -> None:
        """Begin with a copy of another context's keys and values."""
        for layer in prefix.block.store:
            pair = prefix.pair(layer)
            for kept, some in zip(self._room(layer, pair), pair, strict=True):
                kept[0, :, : prefix.length] = some
        self.done = prefix.length

    def _room(self, layer: int, like: Pair) -> Pair:
        if layer not in self.store:
            keys, values = (
                some.new_empty(self.rows, some.shape[-3], self.columns, some.shape[-1])
                for some in like
            )
            self.store[layer] = (keys, values)
        return self.store[layer]


class SlotCache(Layered):
    """A row for each running request, packed at the front.

    It has all of the request's tokens, or those behind a prefix that it shares. What lies
    beyond a row's tokens is left over from others: the mask must hide it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.columns = 0
        self._at = torch.empty(0, dtype=torch.int64)
        self._width = 0
        self._targets: dict[int, Tensor] = {}  # heads -> flat places of the step's new tokens

    def resize(self, rows: int, columns: int, *, used: int) -> None:
        """Take another size; the first `used` rows stay."""
        if (rows, columns) == (self.rows, self.columns):
            return
        self.rows, self.columns = rows, columns
        self._replace(lambda old: _resized(old, rows, columns, used))

    def insert(self, block: Block, sources: Sequence[int], first: int) -> None:
        """Copy contexts of a block into the rows from `first` on; they may repeat."""
        last, width = first + len(sources), min(block.columns, self.columns)
        for layer, pair in block.store.items():
            for kept, new in zip(self._room(layer, pair), pair, strict=True):
                picked = torch.tensor(sources, device=new.device)
                kept[first:last, :, :width] = new[:, :, :width].index_select(0, picked)

    def aim(self, at: Tensor, width: int, groups: Sequence[Group]) -> None:
        """The next `update`s write at these columns of the first rows and read `width` columns."""
        self._at = at
        self._width = width
        self.groups = groups
        self._targets.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> Pair:
        """Write one new token for each row; the keys and values of the first rows."""
        self.layer = layer_idx
        keys, values = self._room(layer_idx, (key_states, value_states))
        return self._put(keys, key_states), self._put(values, value_states)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows over others, as far as the last step has read."""
        for pair in self.store.values():
            for kept in pair:
                kept[targets, :, : self._width] = kept[sources, :, : self._width]

    def wipe(self, rows: Sequence[int]) -> None:
        """Remove what is in rows: a NaN that the mask hides would still poison the sum."""
        for pair in self.store.values():
            for kept in pair:
                kept[list(rows)] = 0

    def clear(self) -> None:
        """Let go of all memory."""
        self.store.clear()
        self.groups = ()
        self.rows = self.columns = 0

    def _put(self, kept: Tensor, new: Tensor) -> Tensor:
        num, heads, _, size = new.shape
        kept.view(-1, size).index_copy_(0, self._target(heads), new.reshape(num * heads, size))
        return kept[:num, :, : self._width]

    def _target(self, heads: int) -> Tensor:
        found = self._targets.get(heads)
        if found is None:
            lines = torch.arange(self._at.shape[0] * heads, device=self._at.device)
            found = lines * self.columns + self._at.repeat_interleave(heads)
            self._targets[heads] = found
        return found

    def _room(self, layer: int, like: Pair) -> Pair:
        if layer not in self.store:
            # Zeros, not garbage, which may be NaN.
            keys, values = (
                some.new_zeros(self.rows, some.shape[1], self.columns, some.shape[3])
                for some in like
            )
            self.store[layer] = (keys, values)
        return self.store[layer]

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        self.store = {layer: (change(k), change(v)) for layer, (k, v) in self.store.items()}


def _resized(old: Tensor, rows: int, columns: int, used: int) -> Tensor:
    new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
    width = min(columns, old.shape[2])
    new[:used, :, :width] = old[:used, :, :width]
    return new
