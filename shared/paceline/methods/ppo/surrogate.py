"""PPO with clipped ratios (arXiv 1707.06347, section 3), optionally with dual clip (1912.09729)."""

from __future__ import annotations

from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.surrogates import bounded_below, clipped, log_ratio
from paceline.methods.ppo import PpoClipOptions


def ppo_clip(tokens: TokenBatch, options: PpoClipOptions) -> TokenLoss:
    """`max(-A r, -A clip(r))` with r = policy / proximal policy."""
    ratio = log_ratio(tokens.logprobs, tokens.old).exp()
    loss = clipped(ratio, tokens.advantages, options)
    return bounded_below(loss, tokens.advantages, options.dual_clip)
