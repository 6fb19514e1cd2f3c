"""GRPO's objective (arXiv 2402.03300): PPO clip, each response weighs the same."""

from __future__ import annotations

from paceline.errors import InvalidError
from paceline_trainer.objectives.base import (
    Loss,
    TokenBatch,
    aggregate,
    clipped,
    log_ratio,
    ratio_sums,
)
from paceline_trainer.objectives.options import GrpoOptions


def grpo(batch: TokenBatch, options: GrpoOptions) -> Loss:
    """PPO clip plus `kl` times k3 to the reference."""
    old = batch.behaviour if options.old == "behaviour" else batch.old
    ratio = log_ratio(batch.logprobs, old).exp()
    tokens, hits = clipped(ratio, batch.advantages, options)
    sums, maxima = ratio_sums(ratio, hits)
    if options.kl:
        if batch.reference is None:
            raise InvalidError("kl needs the log-probs of a reference policy")
        away = log_ratio(batch.logprobs, batch.reference)
        k3 = (-away).exp() - 1.0 + away
        tokens = tokens + options.kl * k3
        sums["reference_kl"] = k3.detach().sum()
    return Loss(aggregate(tokens, batch, options), sums, maxima)
