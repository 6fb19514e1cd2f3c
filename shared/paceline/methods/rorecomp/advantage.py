"""RoRecomp's composition of batches (arXiv 2509.25958; share and interval are ours)."""

from __future__ import annotations

import math

import numpy as np

from paceline.methods.parts.group_statistics import Bools, Floats, members
from paceline.methods.parts.previous import advantages_before
from paceline.plugins import Advantages, Context, EpisodeBatch


def rorecomp(
    batch: EpisodeBatch,
    context: Context,
    *,
    share: float = 0.5,
    every: int = 4,
    success: float = 0.5,
) -> Advantages:
    """The advantages of the part before; of each group the priority or the others have a weight.

    A group without others trains whole.

    Raises:
        InvalidError: no part comes before.
    """
    before = advantages_before(batch)
    weights = np.ones(len(batch.rewards)) if batch.weights is None else batch.weights.copy()
    compensates = context.step % every == every - 1
    lengths = batch.lengths.astype(np.float64)
    for group in members(batch.groups):
        own = group[weights[group] > 0]
        first = priority(batch.rewards[own] > success, lengths[own], share)
        if compensates and not first.all():
            first = ~first
        elif compensates:
            continue
        weights[own[~first]] = 0.0
    return Advantages(before, weights=weights)


def priority(successes: Bools, lengths: Floats, share: float) -> Bools:
    """Mask [N] of a share of the successes, the shortest, and of the failures, the longest."""
    chosen = np.zeros(len(successes), np.bool_)
    for kind, order in ((successes, lengths), (~successes, -lengths)):
        places = np.flatnonzero(kind)
        ranked = places[np.argsort(order[places], kind="stable")]
        chosen[ranked[: math.ceil(share * len(ranked))]] = True
    return chosen
