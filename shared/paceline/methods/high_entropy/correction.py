"""Masks all but the tokens with the highest entropy."""

from __future__ import annotations

from torch import Tensor

from paceline.methods.high_entropy import HighEntropyOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import planned
from paceline.methods.parts.whole_batch import WholeBatch


def chosen(whole: WholeBatch, options: HighEntropyOptions) -> Tensor:
    """Keys of this rank's tokens that train."""
    tokens = whole.tokens
    assert tokens.entropy is not None
    return whole.largest_share(tokens.entropy, options.share)


@planned(chosen)
def high_entropy(tokens: TokenBatch, chosen: Tensor, options: HighEntropyOptions) -> Tensor:
    """1 for the tokens that the plan has chosen, else 0."""
    return tokens.among(chosen).to(tokens.behaviour.dtype)
