"""Aggregates token losses, independent of the split into micro-batches and ranks.

The four modes are those of `agg_loss` in verl; denominators are of the whole update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.parts import AggregationOptions, SumNormOptions
from paceline.methods.parts.batch import TokenBatch


def per_sequence(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sums over the tokens of each sequence, [num_sequences]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequences, values)


def lengths(batch: TokenBatch) -> Tensor:
    """Tokens of each sequence that count, [num_sequences], at least one."""
    sequences = batch.sequences if batch.counted is None else batch.sequences[batch.counted]
    return torch.bincount(sequences, minlength=batch.num_sequences).clamp(min=1)


def token_mean(losses: Tensor, tokens: TokenBatch, options: AggregationOptions) -> Tensor:
    """Every token has the same weight (DAPO, arXiv 2503.14476, section 3.3)."""
    return losses.sum() * (tokens.scale.world / max(tokens.scale.tokens, 1))


def seq_mean_token_sum(losses: Tensor, tokens: TokenBatch, options: AggregationOptions) -> Tensor:
    """The mean over sequences of their summed losses."""
    return losses.sum() * (tokens.scale.world / max(tokens.scale.sequences, 1))


def seq_mean_token_mean(losses: Tensor, tokens: TokenBatch, options: AggregationOptions) -> Tensor:
    """Every sequence has the same weight (GRPO, arXiv 2402.03300, section 4.1)."""
    return (losses / lengths(tokens)[tokens.sequences]).sum() * (
        tokens.scale.world / max(tokens.scale.sequences, 1)
    )


def seq_mean_token_sum_norm(losses: Tensor, tokens: TokenBatch, options: SumNormOptions) -> Tensor:
    """`seq_mean_token_sum` divided by a constant (Dr. GRPO, arXiv 2503.20783, section 3)."""
    return seq_mean_token_sum(losses, tokens, options) / options.norm
