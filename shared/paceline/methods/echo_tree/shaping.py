"""ECHO's hybrid advantage (arXiv 2602.02150)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.echo_tree import EchoHybridOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import planned
from paceline.methods.parts.surrogates import finite
from paceline.methods.parts.whole_batch import WholeBatch


def largest_entropy(whole: WholeBatch, options: EchoHybridOptions) -> float:
    """The largest entropy of a token of the update."""
    del options
    assert whole.tokens.entropy is not None
    return whole.max(finite(whole.tokens.entropy))


@planned(largest_entropy)
def echo_hybrid(tokens: TokenBatch, largest: float, options: EchoHybridOptions) -> Tensor:
    """A (1 + scale (alpha H + beta (1 - C))), [N].

    H is the entropy of a token by the largest one, C the geometric mean of the probabilities with
    which the engine sampled the tokens of the sequence; both in [0, 1] [ours].
    """
    assert tokens.entropy is not None
    entropies = finite(tokens.entropy)
    entropy = (entropies / largest).clamp(0.0, 1.0) if largest else entropies * 0.0
    counts = torch.bincount(tokens.sequences, minlength=tokens.num_sequences).clamp(min=1)
    sums = torch.zeros(tokens.num_sequences, dtype=torch.float64, device=entropy.device)
    sums = sums.index_add(0, tokens.sequences, finite(tokens.behaviour).double())
    confidence = (sums / counts).exp().clamp(max=1.0).to(entropy.dtype)[tokens.sequences]
    uncertain = options.alpha * entropy + options.beta * (1.0 - confidence)
    return tokens.advantages * (1.0 + options.scale * uncertain)
