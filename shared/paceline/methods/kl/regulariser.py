"""KL to the reference policy, estimated from sampled tokens."""

from __future__ import annotations

from torch import Tensor

from paceline.methods.kl import KlOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.surrogates import k3, log_difference, log_ratio

MAX_K3 = 10.0


def kl(tokens: TokenBatch, options: KlOptions) -> Tensor:
    """`coef` times the estimate of KL(policy || reference) at each token."""
    assert tokens.reference is not None
    value = estimate(tokens.logprobs, tokens.reference, options.estimator) * options.coef
    if options.ratio:
        value = value * log_ratio(tokens.logprobs, tokens.old).exp()
    return (
        value * tokens.correction if options.corrected and tokens.correction is not None else value
    )


def estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """With d = log p - log q: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    difference = log_difference(logprobs, reference)
    if estimator == "k1":
        return difference
    k2 = difference.square() / 2.0
    if estimator == "k2":
        return k2
    value = k3(difference).clamp(max=MAX_K3)
    return value if estimator == "k3" else k2 + (value - k2).detach()
