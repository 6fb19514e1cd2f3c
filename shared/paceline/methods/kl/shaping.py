"""KL in the reward: subtracted from the advantage of each token (arXiv 2009.01325, section 3.4)."""

from __future__ import annotations

from torch import Tensor

from paceline.methods.kl import KlPenaltyOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.surrogates import log_ratio


def kl_penalty(tokens: TokenBatch, options: KlPenaltyOptions) -> Tensor:
    """A - coef x (log p - log p_ref), with the log-probs of the proximal policy, [N]."""
    assert tokens.reference is not None
    return tokens.advantages - options.coef * log_ratio(tokens.old, tokens.reference)
