"""Masked importance weights of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.icepop import IcePopOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.surrogates import log_ratio


def icepop(tokens: TokenBatch, options: IcePopOptions) -> Tensor:
    """W = proximal / behaviour where it is within bounds, else 0."""
    weight = log_ratio(tokens.old, tokens.behaviour).exp()
    inside = (weight >= options.lower) & (weight <= options.upper)
    return torch.where(inside, weight, 0.0)
