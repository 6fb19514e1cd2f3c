"""PPO with clipped ratios (arXiv 1707.06347), optionally with dual clip."""

from __future__ import annotations

from paceline_trainer.objectives.base import (
    Loss,
    TokenBatch,
    aggregate,
    clipped,
    log_ratio,
    ratio_sums,
)
from paceline_trainer.objectives.options import PpoClipOptions


def ppo_clip(batch: TokenBatch, options: PpoClipOptions) -> Loss:
    """`max(-A r, -A clip(r))` with r = policy / old policy."""
    old = batch.behaviour if options.old == "behaviour" else batch.old
    ratio = log_ratio(batch.logprobs, old).exp()
    tokens, hits = clipped(ratio, batch.advantages, options)
    return Loss(aggregate(tokens, batch, options), *ratio_sums(ratio, hits))
