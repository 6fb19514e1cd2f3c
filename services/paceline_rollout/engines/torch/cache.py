"""KV caches that any Hugging Face causal LM can write to.

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
    """The keys and values of a context's first `length` tokens, as a part of a block."""

    block: Block
    row: int
    length: int

    def pair(self, layer: int) -> Pair:
        """Keys and values, [H, length, D] each."""
        keys, values = self.block.store[layer]
        return keys[self.row, :, : self.length], values[self.row, :, : self.length]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixGroup:
    """Rows of a `SlotCache` whose contexts share a prefix."""

    rows: slice | Tensor
    prefix: Prefix


class Layered(Cache):
    """A cache with one pair of tensors per layer."""

    groups: Sequence[PrefixGroup] = ()

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.store: dict[int, Pair] = {}  # layer -> keys and values, [R, H, L, D] each
        self.layer = 0  # of the latest `update`, which attention directly follows
        self.latest: tuple[Tensor | None, Tensor | None] = (None, None)  # what it returned

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Not the real sizes: masks are made of `Places`."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as for `get_seq_length`."""
        return 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions and mask are always passed explicitly, and not derived from the cache."""
        return 0


class Block(Layered):
    """Contexts of one prefill, padded on the right; filled at once or in chunks."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns
        self.done = 0  # columns that are computed

    @property
    def size(self) -> int:
        """Tokens for which it has memory."""
        return self.rows * self.columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> Pair:
        """Append columns; returns the keys and values of all columns so far."""
        self.latest = self._append(key_states, value_states, layer_idx)
        return self.latest

    def _append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> Pair:
        self.layer = layer_idx
        pair = (key_states, value_states)
        if key_states.shape[2] == self.columns:
            # A view would keep the larger tensor that it belongs to alive.
            self.store[layer_idx] = (key_states.contiguous(), value_states.contiguous())
            return self.store[layer_idx]
        end = self.done + key_states.shape[2]
        for stored, new in zip(self._storage(layer_idx, pair), pair, strict=True):
            stored[:, :, self.done : end] = new
        keys, values = self.store[layer_idx]
        return keys[:, :, :end], values[:, :, :end]

    def adopt(self, prefix: Prefix) -> None:
        """Start with a copy of another context's keys and values."""
        for layer in prefix.block.store:
            pair = prefix.pair(layer)
            for stored, new in zip(self._storage(layer, pair), pair, strict=True):
                stored[0, :, : prefix.length] = new
        self.done = prefix.length

    def _storage(self, layer: int, like: Pair) -> Pair:
        if layer not in self.store:
            keys, values = (
                one.new_empty(self.rows, one.shape[-3], self.columns, one.shape[-1]) for one in like
            )
            self.store[layer] = (keys, values)
        return self.store[layer]


class SlotCache(Layered):
    """One row per running request, packed at the front.

    A row has all of the request's tokens, or those after the prefix that it shares. Columns beyond
    them hold stale data of other requests: the mask must hide it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.columns = 0
        self._columns_written = torch.empty(0, dtype=torch.int64)
        self._width = 0
        self._targets: dict[int, Tensor] = {}  # heads -> flat indices of the step's new tokens

    def resize(self, rows: int, columns: int, *, used: int) -> None:
        """Change the size; the first `used` rows are kept."""
        if (rows, columns) == (self.rows, self.columns):
            return
        self.rows, self.columns = rows, columns
        self._replace(lambda old: _resized(old, rows, columns, used))

    def insert(self, block: Block, sources: Sequence[int], first: int) -> None:
        """Copy contexts of a block, which may repeat, into the rows from `first` on."""
        last, width = first + len(sources), min(block.columns, self.columns)
        for layer, pair in block.store.items():
            for stored, new in zip(self._storage(layer, pair), pair, strict=True):
                picked = torch.tensor(sources, device=new.device)
                stored[first:last, :, :width] = new[:, :, :width].index_select(0, picked)

    def aim(self, columns: Tensor, width: int, groups: Sequence[PrefixGroup]) -> None:
        """Let the next `update`s write these columns of the first rows and read `width` columns."""
        self._columns_written = columns
        self._width = width
        self.groups = groups
        self._targets.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> Pair:
        """Write one new token per row; returns the keys and values of these rows."""
        self.layer = layer_idx
        keys, values = self._storage(layer_idx, (key_states, value_states))
        self.latest = pair = self._put(keys, key_states), self._put(values, value_states)
        return pair

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows over others, up to the width of the last step."""
        for pair in self.store.values():
            for stored in pair:
                stored[targets, :, : self._width] = stored[sources, :, : self._width]

    def wipe(self, rows: Sequence[int]) -> None:
        """Zero rows: a NaN would poison the attention sum even where the mask hides it."""
        for pair in self.store.values():
            for stored in pair:
                stored[list(rows)] = 0

    def clear(self) -> None:
        """Free all memory."""
        self.store.clear()
        self.groups = ()
        self.rows = self.columns = 0

    def _put(self, stored: Tensor, new: Tensor) -> Tensor:
        num, heads, _, size = new.shape
        stored.view(-1, size).index_copy_(0, self._target(heads), new.reshape(num * heads, size))
        return stored[:num, :, : self._width]

    def _target(self, heads: int) -> Tensor:
        found = self._targets.get(heads)
        if found is None:
            lines = torch.arange(
                self._columns_written.shape[0] * heads, device=self._columns_written.device
            )
            found = lines * self.columns + self._columns_written.repeat_interleave(heads)
            self._targets[heads] = found
        return found

    def _storage(self, layer: int, like: Pair) -> Pair:
        if layer not in self.store:
            # Zeros, as uninitialised memory may hold NaNs.
            keys, values = (
                new.new_zeros(self.rows, new.shape[1], self.columns, new.shape[3]) for new in like
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
