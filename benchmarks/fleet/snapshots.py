"""Bytes that resemble model weights, and their change by an optimiser step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Tensors = list[tuple[str, str, tuple[int, ...]]]
ROW = 512  # elements
_SPREAD = 0.02  # standard deviation, as in trained transformers


def shapes(num_bytes: int, model: str = "model") -> Tensors:
    """Tensors of a bfloat16 decoder with this total size, a multiple of 1 KiB."""
    left = num_bytes // (2 * ROW)
    made: Tensors = []
    for name, rows in _rows(model):
        if not left:
            break
        taken = min(rows, left)
        made.append((name, "bfloat16", (taken, ROW)))
        left -= taken
    return made


def noise(num_bytes: int, seed: int) -> bytes:
    """Incompressible bytes."""
    return np.random.default_rng(seed).bytes(num_bytes)


class Weights:
    """Float32 master weights of a bfloat16 engine."""

    def __init__(self, num_bytes: int, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        size = num_bytes // 2
        self._master = _SPREAD * self._chance.standard_normal(size, dtype=np.float32)

    def train(self, learning_rate: float) -> None:
        """Simulate a step of Adam, whose updates are about as large as the learning rate."""
        moves = self._chance.standard_normal(self._master.size, dtype=np.float32)
        self._master -= np.float32(learning_rate) * moves

    def bytes(self) -> memoryview:
        """The weights rounded to the nearest bfloat16."""
        bits: NDArray[np.uint32] = self._master.view(np.uint32)
        nearest = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        return nearest.astype(np.uint16).data.cast("B")


def _rows(model: str) -> Iterator[tuple[str, int]]:
    yield f"{model}.embed_tokens.weight", 8192
    for layer in itertools.count():
        prefix = f"{model}.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", 1
        for name in "qkvo":
            yield f"{prefix}.self_attn.{name}_proj.weight", ROW
        yield f"{prefix}.post_attention_layernorm.weight", 1
        for name in ("gate", "up", "down"):
            yield f"{prefix}.mlp.{name}_proj.weight", 4 * ROW
