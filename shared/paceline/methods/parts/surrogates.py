"""Ratios of probabilities, and their clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.parts import ClipOptions
from paceline.methods.parts.aggregation import per_sequence
from paceline.methods.parts.batch import TokenBatch, TokenLoss

LOG_RATIO_LIMIT = 20.0


def finite(values: Tensor) -> Tensor:
    """The values, with 0 for those that are not finite, which then have no gradient.

    A token outside of what the sampler allowed has a log-prob of minus infinity, and the entropy of
    a vocabulary with such logits is NaN.
    """
    return torch.where(torch.isfinite(values), values, torch.zeros_like(values))


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """`new - old`, clamped and with non-finite values set to 0, so that `exp` is safe."""
    return finite(new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_difference(new: Tensor, old: Tensor) -> Tensor:
    """`log_ratio` whose gradient with respect to `new` survives clamping.

    A penalty has to pull a policy back however far it has gone.
    """
    difference = finite(new - old)
    return difference + (log_ratio(new, old) - difference).detach()


def k3(difference: Tensor) -> Tensor:
    """Estimates KL(p || q) from d = log p - log q of samples of p: exp(-d) - 1 + d."""
    return torch.exp(-difference) - 1.0 + difference


def sequence_log_ratio(log_ratios: Tensor, tokens: TokenBatch, *, mean: bool) -> Tensor:
    """The sum or the mean of log-ratios over the sequence of each token, [N]."""
    total = per_sequence(log_ratios, tokens)
    if mean:
        ones = torch.bincount(tokens.sequences, minlength=tokens.num_sequences).clamp(min=1)
        total = total / ones
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[tokens.sequences]


def clipped(ratio: Tensor, advantages: Tensor, options: ClipOptions) -> TokenLoss:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))` of each token."""
    return clipped_between(ratio, advantages, 1.0 - options.low, 1.0 + options.high)


def clipped_between(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """`max(-A r, -A clip(r, low, high))` of each token."""
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(low, high)
    return TokenLoss(torch.maximum(unclipped, bounded), bounded > unclipped)


def bounded_below(loss: TokenLoss, advantages: Tensor, bound: float | None) -> TokenLoss:
    """Dual clip (arXiv 1912.09729): `min(loss, -A bound)` where the advantage is negative."""
    if bound is None:
        return loss
    limit = -advantages * bound
    over = (advantages < 0) & (loss.loss > limit)
    cut = over if loss.clipped is None else loss.clipped | over
    return TokenLoss(torch.where(over, limit, loss.loss), cut)
