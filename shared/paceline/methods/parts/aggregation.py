"""Aggregates token losses, independent of the split into micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.options import ClipOptions


def per_sequence(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sums over the tokens of each sequence, [num_sequences]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequences, values)


def lengths(batch: TokenBatch) -> Tensor:
    """Trainable tokens of each sequence, [num_sequences], at least one."""
    return torch.bincount(batch.sequences, minlength=batch.num_sequences).clamp(min=1)


def aggregate(tokens: Tensor, batch: TokenBatch, options: ClipOptions) -> Tensor:
    """One number from token losses; its sum over micro-batches and ranks is exact."""
    scale = batch.scale
    if batch.weights is not None:
        tokens = tokens * batch.weights
    if options.aggregation == "token_mean":
        return tokens.sum() * (scale.world / max(scale.tokens, 1))
    if options.aggregation == "seq_mean_token_mean":
        tokens = tokens / lengths(batch)[batch.sequences]
    elif options.norm is not None:
        tokens = tokens / options.norm
    return tokens.sum() * (scale.world / max(scale.sequences, 1))
