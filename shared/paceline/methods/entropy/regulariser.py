"""Entropy bonus."""

from __future__ import annotations

from torch import Tensor

from paceline.methods.entropy import EntropyOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.surrogates import finite


def entropy(tokens: TokenBatch, options: EntropyOptions) -> Tensor:
    """`-coef` times the entropy at each token."""
    assert tokens.entropy is not None
    return -options.coef * finite(tokens.entropy)
