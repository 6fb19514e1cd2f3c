"""Decoupled PPO (arXiv 2505.24298): clip around the present policy, weigh by the behaviour policy.

The weight and the filter on it are options of their own: without a filter the weight stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline_trainer.objectives.base import (
    Loss,
    TokenBatch,
    aggregate,
    clipped,
    largest,
    lengths,
    log_ratio,
    per_sequence,
    ratio_sums,
)
from paceline_trainer.objectives.options import DecoupledOptions


def decoupled_ppo(batch: TokenBatch, options: DecoupledOptions) -> Loss:
    """`w max(-A u, -A clip(u))` with u = policy / proximal and w = proximal / behaviour."""
    ratio = log_ratio(batch.logprobs, batch.old).exp()
    tokens, hits = clipped(ratio, batch.advantages, options)
    raw = _weights(batch, options.level)
    bounded = raw.clamp(options.lower, options.upper) if _has_bounds(options) else raw
    keep = torch.ones_like(raw) if options.action == "clamp" else (bounded == raw).to(raw.dtype)
    tokens = tokens * keep * (bounded if options.weight else 1.0)
    sums, maxima = ratio_sums(ratio, hits)
    sums |= {"behaviour_weight": raw.sum(), "out_of_bounds": (bounded != raw).sum()}
    maxima["behaviour_weight_max"] = largest(raw)
    return Loss(aggregate(tokens, batch, options), sums, maxima)


def _weights(batch: TokenBatch, level: str) -> Tensor:
    apart = log_ratio(batch.old, batch.behaviour)
    if level == "sequence":
        apart = (per_sequence(apart, batch) / lengths(batch))[batch.sequences]
    return apart.exp()


def _has_bounds(options: DecoupledOptions) -> bool:
    return options.lower is not None or options.upper is not None
