"""The policy that sampled each token, as the trainer computes it, or an approximation by age."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.old_logits import InterpolatedOptions, SnapshotOptions
from paceline.methods.parts.proximal import Between, KnownTokens


def interpolated(known: KnownTokens, options: InterpolatedOptions) -> Between:
    """Log-probs of the start of this step, approximated by the age of each token.

    With k steps from the version that sampled to this one the share is (k - 1) / k, and 0 at k = 0:
    AReaL (`compute_prox_logp_approximations`) takes the version before this one as proximal.
    """
    del options
    return Between(_share(known))


def snapshot(known: KnownTokens, options: SnapshotOptions) -> Between | Tensor:
    """Log-probs under the weights that sampled each token; `interpolated` where not kept."""
    del options
    sampled = known.sampled()
    missing = sampled.isnan()
    return Between(torch.where(missing, _share(known), torch.nan), sampled)


def _share(known: KnownTokens) -> Tensor:
    ages = known.ages.to(known.behaviour.dtype)
    return (ages - 1.0).clamp(min=0.0) / ages.clamp(min=1.0)
