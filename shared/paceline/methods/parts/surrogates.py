"""Policy-gradient surrogates: ratios, clipping, and the statistics they report."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.parts.options import ClipOptions

LOG_RATIO_LIMIT = 20.0


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """`new - old`, clamped and with non-finite values set to 0, so that `exp` is safe."""
    difference = new - old
    finite = torch.where(torch.isfinite(difference), difference, torch.zeros_like(difference))
    return finite.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped(ratio: Tensor, advantages: Tensor, options: ClipOptions) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of each token, and a mask of the tokens that were clipped."""
    high = options.clip if options.clip_high is None else options.clip_high
    unclipped = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1.0 - options.clip, 1.0 + high)
    loss = torch.maximum(unclipped, clipped_loss)
    if options.dual_clip is not None:
        bounded = torch.minimum(loss, -advantages * options.dual_clip)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss, clipped_loss > unclipped


def ratio_sums(ratio: Tensor, clip_mask: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Statistics that every clipped objective reports: sums over tokens, and maxima."""
    detached = ratio.detach()
    sums = {"ratio": detached.sum(), "clip_fraction": clip_mask.sum()}
    return sums, {"ratio_max": largest(detached)}


def largest(values: Tensor) -> Tensor:
    """The maximum of non-negative values; 0 if empty."""
    return values.max() if values.numel() else values.new_zeros(())
