"""GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import (
    Floats,
    center_by,
    check,
    index_of,
    weighted_moments,
    z_by,
)
from paceline.plugins import Context, EpisodeBatch


def grpo(
    batch: EpisodeBatch, context: Context, *, eps: float = 1e-6, deviation: str = "group"
) -> Floats:
    """(R - mean of the group) / (std + eps), with a sample standard deviation; 0 without it.

    `deviation`: over the rewards of the `group`, or over all of the `batch` (TRL's
    `scale_rewards: batch`; arXiv 2508.08221, section 4).
    """
    del context
    rewards, index = check(batch.rewards), index_of(batch.groups)
    if deviation == "group":
        return z_by(rewards, index, unbiased=True, eps=eps)
    _, variance = weighted_moments(rewards, np.ones(len(rewards)))
    centered = center_by(rewards, index)
    return centered / (np.sqrt(variance) + eps) if variance > 0 else np.zeros_like(rewards)
