"""Clip bounds from a bound of the capped second moment (the release of M2PO, solved exactly)."""

from __future__ import annotations

import math

from paceline.methods.m2po import M2poOptions
from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.slots import planned
from paceline.methods.parts.surrogates import LOG_RATIO_LIMIT, clipped_between, log_ratio
from paceline.methods.parts.whole_batch import WholeBatch, largest_where


def cap(whole: WholeBatch, options: M2poOptions) -> float:
    """T such that the sum of min(v, t^2) over affected tokens is tau times their number.

    v is the squared log-ratio to the behaviour policy. Unbounded if v is within the bound as it is.
    """
    tokens = whole.tokens
    ratios = log_ratio(tokens.logprobs, tokens.behaviour)
    affected = ((tokens.advantages > 0) & (ratios > 0)) | ((tokens.advantages < 0) & (ratios < 0))
    squares, count = ratios.square(), whole.count(affected)
    budget = options.tau * count
    if not count or whole.sum(squares, affected) <= budget:
        return LOG_RATIO_LIMIT

    largest = largest_where(lambda c: whole.sum(squares.clamp(max=c), affected) <= budget)
    return math.sqrt(largest)


@planned(cap)
def m2po_cap(tokens: TokenBatch, cap: float, options: M2poOptions) -> TokenLoss:
    """PPO with ratios to the behaviour policy clipped at exp(-t) and exp(t)."""
    ratio = log_ratio(tokens.logprobs, tokens.behaviour).exp()
    return clipped_between(ratio, tokens.advantages, math.exp(-cap), math.exp(cap))
