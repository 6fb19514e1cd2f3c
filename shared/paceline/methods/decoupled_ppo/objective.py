"""Decoupled PPO (arXiv 2505.24298): clip around the proximal policy, weighted by its ratio.

The weight is proximal / behaviour; it and its bounds are separate options.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.decoupled_ppo.options import DecoupledOptions
from paceline.methods.parts.aggregation import aggregate, lengths, per_sequence
from paceline.methods.parts.batch import Loss, TokenBatch
from paceline.methods.parts.surrogates import clipped, largest, log_ratio, ratio_sums


def decoupled_ppo(batch: TokenBatch, options: DecoupledOptions) -> Loss:
    """`w max(-A u, -A clip(u))` with u = policy / proximal and w = proximal / behaviour."""
    ratio = log_ratio(batch.logprobs, batch.old).exp()
    tokens, clip_mask = clipped(ratio, batch.advantages, options)
    raw = _weights(batch, options.level)
    bounded = raw.clamp(options.lower, options.upper) if _has_bounds(options) else raw
    keep = torch.ones_like(raw) if options.action == "clamp" else (bounded == raw).to(raw.dtype)
    tokens = tokens * keep * (bounded if options.weight else 1.0)
    sums, maxima = ratio_sums(ratio, clip_mask)
    sums |= {"behaviour_weight": raw.sum(), "out_of_bounds": (bounded != raw).sum()}
    maxima["behaviour_weight_max"] = largest(raw)
    return Loss(aggregate(tokens, batch, options), sums, maxima)


def _weights(batch: TokenBatch, level: str) -> Tensor:
    log_weight = log_ratio(batch.old, batch.behaviour)
    if level == "sequence":
        log_weight = (per_sequence(log_weight, batch) / lengths(batch))[batch.sequences]
    return log_weight.exp()


def _has_bounds(options: DecoupledOptions) -> bool:
    return options.lower is not None or options.upper is not None
