"""GRPO's objective (arXiv 2402.03300): PPO clip, averaged with equal weight per response."""

from __future__ import annotations

from paceline.errors import InvalidError
from paceline.methods.grpo.options import GrpoOptions
from paceline.methods.parts.aggregation import aggregate
from paceline.methods.parts.batch import Loss, TokenBatch
from paceline.methods.parts.surrogates import clipped, log_ratio, ratio_sums


def grpo(batch: TokenBatch, options: GrpoOptions) -> Loss:
    """PPO clip plus `kl` times k3 to the reference."""
    old = batch.behaviour if options.old == "behaviour" else batch.old
    ratio = log_ratio(batch.logprobs, old).exp()
    tokens, clip_mask = clipped(ratio, batch.advantages, options)
    sums, maxima = ratio_sums(ratio, clip_mask)
    if options.kl:
        if batch.reference is None:
            raise InvalidError("kl needs the log-probs of a reference policy")
        log_ratio_ref = log_ratio(batch.logprobs, batch.reference)
        k3 = (-log_ratio_ref).exp() - 1.0 + log_ratio_ref
        tokens = tokens + options.kl * k3
        sums["reference_kl"] = k3.detach().sum()
    return Loss(aggregate(tokens, batch, options), sums, maxima)
