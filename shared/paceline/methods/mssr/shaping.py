"""MSSR's entropy-shaped advantage (arXiv 2512.18215, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.mssr import MssrEntropyOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.surrogates import finite


def mssr_entropy(tokens: TokenBatch, options: MssrEntropyOptions) -> Tensor:
    """A + min(scale x entropy, |A| / bound), [N]."""
    if options.entropy == "full":
        assert tokens.entropy is not None
        entropy = finite(tokens.entropy.detach())
    else:
        logprobs = finite(tokens.old)
        entropy = -logprobs.exp() * logprobs
    limit = tokens.advantages.abs() / options.bound
    return tokens.advantages + torch.minimum(options.scale * entropy, limit)
