"""DART's trim (arXiv 2509.23866; release: the trainable filter)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import members
from paceline.methods.parts.previous import advantages_before
from paceline.plugins import Advantages, Context, EpisodeBatch
from paceline.plugins.groups import trimmed


def dart_trim(
    batch: EpisodeBatch, context: Context, *, keep: int, success: float = 0.5
) -> Advantages:
    """The advantages of the part before; of each group `keep` episodes have a weight.

    The first ones are kept, but a success and a failure are among them if the group has both.

    Raises:
        InvalidError: no part comes before.
    """
    del context
    before = advantages_before(batch)
    weights = np.ones(len(batch.rewards)) if batch.weights is None else batch.weights.copy()
    for group in members(batch.groups):
        own = group[weights[group] > 0]
        gone = np.setdiff1d(own, own[trimmed([*(batch.rewards[own] > success)], keep)])
        weights[gone] = 0.0
    return Advantages(before, weights=weights)
