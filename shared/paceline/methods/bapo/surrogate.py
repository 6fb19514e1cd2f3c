"""PPO clip with bounds that are raised until positive tokens contribute a share of the loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.methods.bapo import BapoOptions
from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.slots import planned
from paceline.methods.parts.surrogates import clipped_between, log_ratio
from paceline.methods.parts.whole_batch import WholeBatch


def bounds(whole: WholeBatch, options: BapoOptions) -> tuple[float, float]:
    """The first bounds of the search with which the share is reached; else both ceilings."""
    tokens = whole.tokens
    if not whole.count(tokens.advantages != 0):
        return options.low, options.high
    low, high = options.low, options.high
    # Bounds are start + count * step, so that no rounding adds up.
    for count in range(1, _steps(options.high, options.max_high, options.high_step) + 1):
        if share(whole, options, low, high) >= options.share:
            return low, high
        high = min(options.high + count * options.high_step, options.max_high)
    for count in range(1, _steps(options.low, options.max_low, options.low_step) + 1):
        if share(whole, options, low, high) >= options.share:
            return low, high
        low = min(options.low + count * options.low_step, options.max_low)
    return low, high


def _steps(start: float, ceiling: float, step: float) -> int:
    return math.ceil((ceiling - start) / step - 1e-9)


def share(whole: WholeBatch, options: BapoOptions, low: float, high: float) -> float:
    """The contribution of positive tokens over that of all, weighted by p(behaviour)."""
    tokens = whole.tokens
    mass = _mass(tokens, options, low, high)
    total = whole.sum(mass)
    return whole.sum(mass, tokens.advantages > 0) / total if total else 0.0


def _mass(tokens: TokenBatch, options: BapoOptions, low: float, high: float) -> Tensor:
    ratio = log_ratio(tokens.logprobs, tokens.old).exp()
    surrogate = clipped_between(ratio, tokens.advantages, low, high)
    mass = tokens.behaviour.exp() * surrogate.loss.abs()
    if options.measure == "gradient" and surrogate.clipped is not None:
        mass = torch.where(surrogate.clipped, 0.0, mass)
    return torch.nan_to_num(mass, nan=0.0, posinf=0.0)


@planned(bounds)
def bapo(tokens: TokenBatch, bounds: tuple[float, float], options: BapoOptions) -> TokenLoss:
    """`max(-A r, -A clip(r, low, high))` with the bounds of the plan."""
    ratio = log_ratio(tokens.logprobs, tokens.old).exp()
    return clipped_between(ratio, tokens.advantages, *bounds)
