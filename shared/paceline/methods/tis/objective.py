"""Truncated importance sampling: the clipped surrogate times min(proximal / behaviour, cap)."""

from __future__ import annotations

from torch import Tensor

from paceline.methods.parts.aggregation import aggregate, per_sequence
from paceline.methods.parts.batch import Loss, TokenBatch
from paceline.methods.parts.surrogates import (
    LOG_RATIO_LIMIT,
    clipped,
    largest,
    log_ratio,
    ratio_sums,
)
from paceline.methods.tis.options import TisOptions


def tis(batch: TokenBatch, options: TisOptions) -> Loss:
    """`min(w, cap)` times the clipped surrogate around the proximal policy."""
    ratio = log_ratio(batch.logprobs, batch.old).exp()
    tokens, clip_mask = clipped(ratio, batch.advantages, options)
    raw = weights(batch, options.level)
    sums, maxima = ratio_sums(ratio, clip_mask)
    sums |= {"behaviour_weight": raw.sum(), "out_of_bounds": (raw > options.cap).sum()}
    maxima["behaviour_weight_max"] = largest(raw)
    return Loss(aggregate(tokens * raw.clamp(max=options.cap), batch, options), sums, maxima)


def weights(batch: TokenBatch, level: str) -> Tensor:
    """Importance weights before truncation, without gradient."""
    log_weight = log_ratio(batch.old, batch.behaviour)
    if level == "sequence":
        summed = per_sequence(log_weight, batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_weight = summed[batch.sequences]
    return log_weight.exp()
