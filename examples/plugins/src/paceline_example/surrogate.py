"""A surrogate: the policy-gradient loss of each token."""

from __future__ import annotations

from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.surrogates import log_ratio
from paceline_example.options import CappedOptions


def capped(tokens: TokenBatch, options: CappedOptions) -> TokenLoss:
    """`-A w log p` with w = min(policy / behaviour, cap) held fixed.

    The trainer multiplies it by the corrections and averages it; `sums` are sums over tokens, whose
    means are logged as `capped_importance`.
    """
    weights = log_ratio(tokens.logprobs.detach(), tokens.behaviour).exp().clamp(max=options.cap)
    loss = -tokens.advantages * weights * tokens.logprobs
    return TokenLoss(loss, sums={"importance": weights.sum()})
