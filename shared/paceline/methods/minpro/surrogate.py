"""REINFORCE weighted by a token's ratio times the smallest ratio before it."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.minpro import MinproOptions
from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.surrogates import log_ratio


def minpro(tokens: TokenBatch, options: MinproOptions) -> TokenLoss:
    """`-clip(m_t r_t) A log p`, m_t the minimum of r before t in the sequence, 1 at its start."""
    log_ratios = log_ratio(tokens.logprobs.detach(), tokens.behaviour)
    least = prefix_minimum(log_ratios, tokens)
    if options.include_one:
        least = least.clamp(max=0.0)
    weight = (least + log_ratios).exp().clamp(max(1.0 - options.low, 0.0), 1.0 + options.high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs)


def prefix_minimum(values: Tensor, tokens: TokenBatch) -> Tensor:
    """The smallest value before each token in its sequence, [N]; 0 at the start of a sequence."""
    if not values.numel():
        return values
    counts = torch.bincount(tokens.sequences, minlength=tokens.num_sequences)
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(values), device=values.device) - starts[tokens.sequences]
    grid = values.new_full((tokens.num_sequences, int(counts.max()) + 1), torch.inf)
    grid[tokens.sequences, column + 1] = values
    least = grid.cummin(dim=1).values[tokens.sequences, column]
    return torch.where(torch.isinf(least), torch.zeros_like(least), least)
