"""Masks all but the tokens with the highest entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.methods.high_entropy.options import HighEntropyOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import planned
from paceline.methods.parts.whole_batch import WholeBatch


def chosen(whole: WholeBatch, options: HighEntropyOptions) -> Tensor:
    """Keys of this rank's tokens that train."""
    tokens = whole.tokens
    assert tokens.entropy is not None
    assert tokens.keys is not None
    k = max(1, math.ceil(options.share * whole.scale_tokens))
    return tokens.keys[whole.largest(tokens.entropy, k)]


@planned(chosen)
def high_entropy(tokens: TokenBatch, chosen: Tensor, options: HighEntropyOptions) -> Tensor:
    """1 for the tokens that the plan has chosen, else 0."""
    assert tokens.keys is not None
    return torch.isin(tokens.keys, chosen).to(tokens.behaviour.dtype)
