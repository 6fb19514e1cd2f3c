"""The clipped sequence ratio."""

from __future__ import annotations

from paceline.methods.gspo import GspoOptions
from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.surrogates import clipped_between, log_ratio, sequence_log_ratio

MAX_LOG_RATIO = 10.0


def gspo(tokens: TokenBatch, options: GspoOptions) -> TokenLoss:
    """`max(-A s, -A clip(s))`, s the geometric mean of the sequence's ratios.

    Its value is that of the sequence; its gradient reaches each token through its own log-prob.
    """
    log_ratios = log_ratio(tokens.logprobs.detach(), tokens.old)
    mean = sequence_log_ratio(log_ratios, tokens, mean=True)
    own = mean + tokens.logprobs - tokens.logprobs.detach()
    ratio = own.clamp(max=MAX_LOG_RATIO).exp()
    return clipped_between(ratio, tokens.advantages, 1.0 - options.low, 1.0 + options.high)
