"""Level 2 of D3S (arXiv 2509.22115, section 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.methods.d3s.options import D3sTokensOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import planned
from paceline.methods.parts.whole_batch import WholeBatch


def chosen(whole: WholeBatch, options: D3sTokensOptions) -> Tensor:
    """Keys of this rank's tokens that train."""
    tokens = whole.tokens
    assert tokens.entropy is not None
    assert tokens.keys is not None
    k = max(1, math.ceil(options.share * whole.scale_tokens))
    return tokens.keys[whole.largest(tokens.advantages.abs() * tokens.entropy, k)]


@planned(chosen)
def d3s_tokens(tokens: TokenBatch, chosen: Tensor, options: D3sTokensOptions) -> Tensor:
    """1 for the tokens with the largest |advantage| x entropy of the update, else 0."""
    assert tokens.keys is not None
    return torch.isin(tokens.keys, chosen).to(tokens.behaviour.dtype)
