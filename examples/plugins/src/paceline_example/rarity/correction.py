"""A slot of the trainer: weights of tokens, without gradient."""

from __future__ import annotations

from torch import Tensor

from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.surrogates import log_ratio
from paceline_example.rarity import NearOptions


def near(tokens: TokenBatch, options: NearOptions) -> Tensor:
    """exp(-(log(proximal / behaviour) / width)^2) of each token."""
    return (-(log_ratio(tokens.old, tokens.behaviour) / options.width).square()).exp()
