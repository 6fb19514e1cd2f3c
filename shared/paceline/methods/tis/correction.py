"""Truncated importance sampling between engine and trainer (Yao et al. 2025; verl, slime)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import planned
from paceline.methods.parts.surrogates import log_ratio, sequence_log_ratio
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.methods.tis import TisOptions

LEAST_MEAN = 1e-8


def mean_weight(whole: WholeBatch, options: TisOptions) -> float:
    """The divisor of weights: their mean over all tokens, or sequences, of the update."""
    if not options.normalise:
        return 1.0
    tokens = whole.tokens
    weights = _truncated(tokens, options)
    if options.level == "sequence":
        lengths = torch.bincount(tokens.sequences, minlength=tokens.num_sequences)
        mean = whole.sum(weights / lengths[tokens.sequences]) / max(tokens.scale.sequences, 1)
    else:
        mean = whole.mean(weights)
    return mean if mean > LEAST_MEAN else 1.0


@planned(mean_weight, needs_logprobs=False)
def tis(tokens: TokenBatch, mean: float, options: TisOptions) -> Tensor:
    """W = min(proximal / behaviour, cap)."""
    return _truncated(tokens, options) / mean


def _truncated(tokens: TokenBatch, options: TisOptions) -> Tensor:
    log_weight = log_ratio(tokens.old, tokens.behaviour)
    if options.level == "sequence":
        log_weight = sequence_log_ratio(log_weight, tokens, mean=False)
    return log_weight.exp().clamp(max=options.cap)
