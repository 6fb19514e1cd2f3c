"""Level 1 of D3S (arXiv 2509.22115, section 3)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, Ints, members
from paceline.methods.parts.previous import episode_advantages_before
from paceline.plugins import Advantages, Context, EpisodeBatch


def d3s_episodes(
    batch: EpisodeBatch, context: Context, *, start: float, end: float, scope: str = "batch"
) -> Advantages:
    """The advantages of the part before; episodes that are not chosen have weight 0.

    Episodes whose weight is already 0 are not among those to choose from.

    Raises:
        InvalidError: no part with a value for each episode comes before.
    """
    before = episode_advantages_before(batch)
    share = (1.0 - context.progress) * start + context.progress * end
    labels = batch.groups if scope == "group" else np.zeros_like(batch.groups)
    earlier = np.ones(len(before)) if batch.weights is None else batch.weights
    weights = np.zeros(len(before))
    for every in members(labels):
        own = every[earlier[every] > 0]
        size = max(1, round(share * len(own)))
        chosen = own[most_varied(before[own], size)]
        weights[chosen] = earlier[chosen]
    return Advantages(before, weights=weights, notes={"chosen_share": share})


def most_varied(values: Floats, size: int) -> Ints:
    """Indices of the `size` values with the largest variance.

    They are the k largest and the size - k smallest for some k (proposition 1), which is found with
    prefix sums; of equal variances that with the smallest k.
    """
    if size >= len(values):
        return np.arange(len(values))
    order = np.argsort(values, kind="stable")
    ordered = values[order] - values.mean()
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    squares = np.concatenate(([0.0], np.cumsum(ordered * ordered)))
    k = np.arange(size + 1)
    total = sums[size - k] + sums[-1] - sums[len(values) - k]
    square = squares[size - k] + squares[-1] - squares[len(values) - k]
    variances = square / size - (total / size) ** 2
    best = int(np.argmax(np.round(variances, 12)))
    return np.sort(np.concatenate((order[: size - best], order[len(values) - best :])))
