"""The behaviour weight of decoupled PPO (arXiv 2505.24298, section 5.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.decoupled_ppo import BehaviourWeightOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.surrogates import log_ratio, sequence_log_ratio


def behaviour_weight(tokens: TokenBatch, options: BehaviourWeightOptions) -> Tensor:
    """W = proximal / behaviour, masked or clamped where it is out of bounds."""
    log_weight = log_ratio(tokens.old, tokens.behaviour)
    if options.level == "sequence":
        log_weight = sequence_log_ratio(log_weight, tokens, mean=True)
    weight = log_weight.exp()
    bounded = weight
    if options.lower is not None or options.upper is not None:
        bounded = weight.clamp(options.lower, options.upper)
    if options.action == "clamp":
        return bounded
    return torch.where(bounded == weight, weight, 0.0)
