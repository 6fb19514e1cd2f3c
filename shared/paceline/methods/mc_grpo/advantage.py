"""MC-GRPO (arXiv 2601.22582, section 4)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, check, members
from paceline.plugins import Advantages, Context, EpisodeBatch

_EPS = 1e-3
_NONE = 1e-6


def mc_grpo(
    batch: EpisodeBatch,
    context: Context,
    *,
    guard: bool = True,
    clip: float = 5.0,
    rescale: bool = False,
) -> Advantages:
    """(R - median) / (median deviation + 0.001), [N]; the median sample itself has weight 0."""
    del context
    rewards = check(batch.rewards)
    values, weights = np.zeros_like(rewards), np.ones_like(rewards)
    for own in members(batch.groups):
        pivot = own[np.argsort(rewards[own], kind="stable")[(len(own) - 1) // 2]]
        scaled = _scaled(rewards[own] - rewards[pivot], guard=guard, clip=clip)
        nonzero = np.count_nonzero(scaled)
        values[own] = scaled * len(own) / nonzero if rescale and nonzero else scaled
        weights[pivot] = 0.0
    return Advantages(values, weights=weights)


def _scaled(off: Floats, *, guard: bool, clip: float) -> Floats:
    deviation = float(np.sort(np.abs(off))[(len(off) - 1) // 2])
    if guard and deviation < _NONE:
        spread = float(off.std(ddof=1)) if len(off) > 1 else 0.0
        return np.clip(off / (spread + _EPS), -clip, clip) if spread > _NONE else np.zeros_like(off)
    scaled = off / (deviation + _EPS)
    return np.clip(scaled, -clip, clip) if guard else scaled
