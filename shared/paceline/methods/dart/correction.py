"""DART's selection of steps by entropy (arXiv 2509.23866; commented out in the release)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.methods.dart import DartStepsOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import planned
from paceline.methods.parts.surrogates import finite
from paceline.methods.parts.whole_batch import WholeBatch


def chosen(whole: WholeBatch, options: DartStepsOptions) -> Tensor:
    """Keys of the first tokens of this rank's turns that train."""
    tokens = whole.tokens
    assert tokens.entropy is not None
    assert tokens.keys is not None
    names, index = tokens.turns.unique(return_inverse=True)
    sums = torch.zeros(len(names), dtype=torch.float64, device=index.device)
    means = sums.index_add(0, index, finite(tokens.entropy).double()) / index.bincount()
    first = tokens.keys == tokens.turns
    keep = max(1, math.ceil(options.share * whole.count(first)))
    return whole.keys(whole.largest(means[index].float(), keep, among=first))


@planned(chosen)
def dart_steps(tokens: TokenBatch, chosen: Tensor, options: DartStepsOptions) -> Tensor:
    """1 for the tokens of the turns with the highest mean entropy of the update, else 0."""
    del options
    return torch.isin(tokens.turns, chosen).to(tokens.behaviour.dtype)
