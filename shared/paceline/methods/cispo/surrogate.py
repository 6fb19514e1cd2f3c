"""REINFORCE with clipped importance weights."""

from __future__ import annotations

from paceline.methods.cispo import CispoOptions
from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.surrogates import log_ratio


def cispo(tokens: TokenBatch, options: CispoOptions) -> TokenLoss:
    """`-clip(r) A log p`, where the clipped ratio carries no gradient."""
    ratio = log_ratio(tokens.logprobs.detach(), tokens.old).exp()
    weight = ratio.clamp(max(1.0 - options.low, 0.0), 1.0 + options.high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs)
