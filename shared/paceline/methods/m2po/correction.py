"""Masks the tokens with the largest squared log-ratios until their mean is within a bound."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.methods.m2po import M2poOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import planned
from paceline.methods.parts.whole_batch import WholeBatch


def dropped(whole: WholeBatch, options: M2poOptions) -> Tensor:
    """Keys of this rank's tokens to mask, of those whose update PPO clipping could affect."""
    tokens = whole.tokens
    ratios = tokens.logprobs - tokens.behaviour
    affected = ((tokens.advantages > 0) & (ratios > 0)) | ((tokens.advantages < 0) & (ratios < 0))
    # A log-ratio that is not a number is the first to be masked.
    affected = affected | ((tokens.advantages != 0) & ~torch.isfinite(ratios))
    count = whole.count(affected)
    mask = whole.largest_until(ratios.square(), affected, _within(options.tau, count))
    return whole.keys(mask)


def _within(tau: float, count: int) -> Callable[[int, float], bool]:
    return lambda taken, left: left <= tau * (count - taken)


@planned(dropped)
def m2po(tokens: TokenBatch, dropped: Tensor, options: M2poOptions) -> Tensor:
    """0 for tokens that the plan has dropped, else 1."""
    return (~tokens.among(dropped)).to(tokens.behaviour.dtype)


def dropped_proximal(whole: WholeBatch, options: M2poOptions) -> Tensor:
    """Keys of this rank's tokens to mask; at least one token of all ranks is kept."""
    tokens = whole.tokens
    squares = (tokens.old - tokens.behaviour).square()
    everything = torch.ones_like(squares, dtype=torch.bool)
    count = whole.count(everything)

    def enough(taken: int, left: float) -> bool:
        return taken >= count - 1 or left < options.tau * (count - taken)

    return whole.keys(whole.largest_until(squares, everything, enough))


@planned(dropped_proximal, needs_logprobs=False)
def m2po_prox_mask(tokens: TokenBatch, dropped: Tensor, options: M2poOptions) -> Tensor:
    """0 for tokens that the plan has dropped, else 1 (`areal/trainer/ppo/actor.py`)."""
    return m2po(tokens, dropped, options)
