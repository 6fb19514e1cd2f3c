"""The policy gradient without clipping."""

from __future__ import annotations

from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.surrogates import log_ratio
from paceline.methods.reinforce import ReinforceOptions


def reinforce(tokens: TokenBatch, options: ReinforceOptions) -> TokenLoss:
    """`-A log p`, or `-r A`."""
    if options.is_ratio:
        return TokenLoss(-log_ratio(tokens.logprobs, tokens.old).exp() * tokens.advantages)
    return TokenLoss(-tokens.advantages * tokens.logprobs)
