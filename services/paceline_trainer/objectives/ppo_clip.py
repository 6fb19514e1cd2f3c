"""PPO with clipped ratios (arXiv 1707.06347), optionally with dual clip."""

from __future__ import annotations

from typing import Literal

from paceline_trainer.objectives.base import (
    ClipOptions,
    Loss,
    TokenBatch,
    aggregate,
    clipped,
    log_ratio,
    ratio_sums,
)


class PpoClipOptions(ClipOptions):
    """Options of `ppo_clip`."""

    old: Literal["behaviour", "proximal"] = "behaviour"
    """Whose probabilities are the ratio's denominator: those of the policy that sampled, or those
    of the weights at the start of the batch."""


def ppo_clip(batch: TokenBatch, options: PpoClipOptions) -> Loss:
    """`max(-A r, -A clip(r))` with r = policy / old policy."""
    old = batch.behaviour if options.old == "behaviour" else batch.old
    ratio = log_ratio(batch.logprobs, old).exp()
    tokens, hits = clipped(ratio, batch.advantages, options)
    return Loss(aggregate(tokens, batch, options), *ratio_sums(ratio, hits))
