"""Level 2 of D3S (arXiv 2509.22115, section 3)."""

from __future__ import annotations

from torch import Tensor

from paceline.methods.d3s import D3sTokensOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import planned
from paceline.methods.parts.whole_batch import WholeBatch


def chosen(whole: WholeBatch, options: D3sTokensOptions) -> Tensor:
    """Keys of this rank's tokens that train."""
    tokens = whole.tokens
    assert tokens.entropy is not None
    share = (1.0 - tokens.progress) * options.start + tokens.progress * options.end
    return whole.largest_share(tokens.advantages.abs() * tokens.entropy, share)


@planned(chosen)
def d3s_tokens(tokens: TokenBatch, chosen: Tensor, options: D3sTokensOptions) -> Tensor:
    """1 for the tokens with the largest |advantage| x entropy of the update, else 0."""
    return tokens.among(chosen).to(tokens.behaviour.dtype)
