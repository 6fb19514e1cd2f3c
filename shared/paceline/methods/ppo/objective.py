"""PPO with clipped ratios (arXiv 1707.06347), optionally with dual clip."""

from __future__ import annotations

from paceline.methods.parts.aggregation import aggregate
from paceline.methods.parts.batch import Loss, TokenBatch
from paceline.methods.parts.surrogates import clipped, log_ratio, ratio_sums
from paceline.methods.ppo.options import PpoClipOptions


def ppo_clip(batch: TokenBatch, options: PpoClipOptions) -> Loss:
    """`max(-A r, -A clip(r))` with r = policy / old policy."""
    old = batch.behaviour if options.old == "behaviour" else batch.old
    ratio = log_ratio(batch.logprobs, old).exp()
    tokens, clip_mask = clipped(ratio, batch.advantages, options)
    return Loss(aggregate(tokens, batch, options), *ratio_sums(ratio, clip_mask))
