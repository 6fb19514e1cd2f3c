"""Key/value caches that any Hugging Face causal LM can write to.

Legend of shapes: R rows, H heads, L columns (positions), D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache


class PrefillCache(Cache):
    """Catches the keys and values of one forward pass over right-padded prompts."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.caught: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Keep them; attention needs no others."""
        self.caught[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing came before."""
        return 0


class SlotCache(Cache):
    """A row for each running request, packed at the front; column = position.

    What lies beyond a row's length is left over from others: the mask must hide it.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows = 0
        self.columns = 0
        self._store: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> [R, H, L, D]
        self._positions = torch.empty(0, dtype=torch.int64)
        self._width = 0
        self._targets: dict[int, Tensor] = {}  # heads -> flat places of the step's new tokens

    def reserve(self, rows: int, columns: int) -> None:
        """Make room, keeping what is there."""
        rows, columns = max(rows, self.rows), max(columns, self.columns)
        if (rows, columns) == (self.rows, self.columns):
            return
        self.rows, self.columns = rows, columns
        self._replace(lambda old: _enlarged(old, rows, columns))

    def insert(self, caught: PrefillCache, sources: Tensor, first: int) -> None:
        """Copy prefilled prompts `sources` into the rows from `first` on; they may repeat."""
        last = first + sources.shape[0]
        for layer, pair in caught.caught.items():
            if layer not in self._store:
                self._store[layer] = (self._empty(pair[0]), self._empty(pair[1]))
            for kept, new in zip(self._store[layer], pair, strict=True):
                kept[first:last, :, : new.shape[2]] = new.index_select(0, sources)

    def aim(self, positions: Tensor, width: int) -> None:
        """The next `update`s write at `positions` of the first rows and read `width` columns."""
        self._positions = positions
        self._width = width
        self._targets.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Write one new token for each row; the keys and values of the first rows."""
        keys, values = self._store[layer_idx]
        return self._put(keys, key_states), self._put(values, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Callers give positions and mask, so nobody may derive them from this."""
        return self._width

    def move(self, sources: Tensor, targets: Tensor, width: int) -> None:
        """Copy rows over others."""
        for pair in self._store.values():
            for kept in pair:
                kept[targets, :, :width] = kept[sources, :, :width]

    def clear(self) -> None:
        """Let go of all memory."""
        self._store.clear()
        self.rows = self.columns = 0

    def _put(self, kept: Tensor, new: Tensor) -> Tensor:
        num, heads, _, size = new.shape
        kept.view(-1, size).index_copy_(0, self._target(heads), new.reshape(num * heads, size))
        return kept[:num, :, : self._width]

    def _target(self, heads: int) -> Tensor:
        found = self._targets.get(heads)
        if found is None:
            device = self._positions.device
            lines = torch.arange(self._positions.shape[0] * heads, device=device)
            found = lines * self.columns + self._positions.repeat_interleave(heads)
            self._targets[heads] = found
        return found

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not garbage: a NaN that the mask hides would still poison the sum.
        return like.new_zeros(self.rows, like.shape[1], self.columns, like.shape[3])

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        self._store = {layer: (change(k), change(v)) for layer, (k, v) in self._store.items()}


def _enlarged(old: Tensor, rows: int, columns: int) -> Tensor:
    new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
