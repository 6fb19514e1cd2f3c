"""REINFORCE++ and its baseline variant (arXiv 2501.03262)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import (
    Floats,
    center_by,
    check,
    index_of,
    weighted_moments,
    without,
)
from paceline.plugins import Context, EpisodeBatch

_EPS = 1e-8


def reinforce_pp(
    batch: EpisodeBatch, context: Context, *, gamma: float = 1.0, center: bool = True
) -> Floats:
    """Returns whitened over all policy tokens: [N] if `gamma` is 1, else [T]."""
    del context
    rewards = check(batch.rewards)
    if gamma == 1.0:
        return whitened(rewards, batch.lengths.astype(np.float64), center=center)
    spread = np.repeat(rewards, batch.lengths)
    left = np.concatenate([np.arange(n)[::-1] for n in batch.lengths.tolist()] or [np.zeros(0)])
    returns = spread * gamma**left
    return whitened(returns, np.ones(len(returns)), center=center)


def reinforce_pp_baseline(batch: EpisodeBatch, context: Context, *, center: bool = True) -> Floats:
    """R - mean of the group, whitened over all policy tokens, [N]."""
    del context
    centered = center_by(check(batch.rewards), index_of(batch.groups))
    return whitened(centered, batch.lengths.astype(np.float64), center=center)


def whitened(values: Floats, counts: Floats, *, center: bool) -> Floats:
    """Values divided by the deviation over tokens, `counts` of which have each value."""
    if counts.sum() <= 1:
        return np.zeros_like(values)
    mean, variance = weighted_moments(values, counts)
    return (without(mean, values) if center else values) / np.sqrt(variance + _EPS)
