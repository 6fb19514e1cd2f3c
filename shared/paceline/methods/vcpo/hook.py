"""Scales the learning rate by the effective sample size (section 4.2 of the paper)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.methods.parts.slots import StepScale
from paceline.methods.parts.surrogates import log_ratio
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.methods.vcpo import VcpoStepOptions


def vcpo_step(whole: WholeBatch, options: VcpoStepOptions) -> StepScale:
    """sqrt(min(1, rho / base)) with rho = ESS / B over the B sequences of the update.

    The weight of a sequence is the product of its tokens' policy / behaviour, not truncated. All is
    computed from logarithms: the additive 1e-8 of the release makes ESS vanish for small weights.
    """
    share = effective_share(whole)
    ratio = min(1.0, share / options.base)
    factor = math.sqrt(ratio) if options.rule == "sqrt" else ratio
    return StepScale(factor, {"ess": share})


def effective_share(whole: WholeBatch) -> float:
    """(sum w)^2 / (B sum w^2) over the sequences of all ranks; 0 without any."""
    weights = _log_weights(whole)
    largest = whole.max(weights, empty=-math.inf)
    count = whole.tokens.scale.sequences
    if not count or not math.isfinite(largest):
        return 0.0
    scaled = (weights - largest).exp()
    return whole.sum(scaled) ** 2 / (whole.sum(scaled.square()) * count)


def _log_weights(whole: WholeBatch) -> Tensor:
    """Log of the weight of each of this rank's sequences."""
    tokens = whole.tokens
    ratios = log_ratio(tokens.logprobs, tokens.behaviour).double()
    sums = torch.zeros(tokens.num_sequences, dtype=torch.float64, device=ratios.device)
    return sums.index_add(0, tokens.sequences, ratios)
