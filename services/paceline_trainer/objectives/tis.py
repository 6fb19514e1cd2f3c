"""Truncated importance sampling: the surrogate times min(proximal / behaviour, cap)."""

from __future__ import annotations

from torch import Tensor

from paceline_trainer.objectives.base import (
    LOG_RATIO_LIMIT,
    Loss,
    TokenBatch,
    aggregate,
    clipped,
    largest,
    log_ratio,
    per_sequence,
    ratio_sums,
)
from paceline_trainer.objectives.options import TisOptions


def tis(batch: TokenBatch, options: TisOptions) -> Loss:
    """`min(w, cap)` times the clipped surrogate around the proximal policy."""
    ratio = log_ratio(batch.logprobs, batch.old).exp()
    tokens, hits = clipped(ratio, batch.advantages, options)
    raw = weights(batch, options.level)
    sums, maxima = ratio_sums(ratio, hits)
    sums |= {"behaviour_weight": raw.sum(), "out_of_bounds": (raw > options.cap).sum()}
    maxima["behaviour_weight_max"] = largest(raw)
    return Loss(aggregate(tokens * raw.clamp(max=options.cap), batch, options), sums, maxima)


def weights(batch: TokenBatch, level: str) -> Tensor:
    """Importance weights before truncation, without gradient."""
    apart = log_ratio(batch.old, batch.behaviour)
    if level == "sequence":
        whole = per_sequence(apart, batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        apart = whole[batch.sequences]
    return apart.exp()
