"""Group statistics shared by the advantage estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def check(rewards: Any) -> Floats:
    """Rewards as float64.

    Raises:
        InvalidError: a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise InvalidError(
            f"reward of episode {bad[0]} of the batch is {values[bad[0]]}; rewards must be finite"
        )
    return values


def index_of(labels: Any) -> Ints:
    """The number of each label's set, from 0, in the order of labels."""
    _, inverse = np.unique(np.asarray(labels), return_inverse=True)
    return inverse.reshape(-1).astype(np.int64)


def members(labels: Any) -> list[Ints]:
    """Indices of the values with the same label, in order, for each label."""
    index = index_of(labels)
    if not len(index):
        return []
    return np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])


def mean_by(values: Floats, index: Ints) -> Floats:
    """The mean over all values with the same index, for each value."""
    counts = np.bincount(index)
    return (np.bincount(index, weights=values) / np.maximum(counts, 1))[index]


def center_by(values: Floats, index: Ints) -> Floats:
    """Values minus the mean over all values with the same index."""
    return without(mean_by(values, index), values)


def without(mean: Floats | float, values: Floats) -> Floats:
    """Values minus a mean of them.

    Equal values leave no rounding errors, which division by a tiny deviation would amplify.
    """
    centered = values - mean
    centered[np.abs(centered) < 1e-12 * np.maximum(1.0, np.abs(values))] = 0.0
    return centered


def z_by(values: Floats, index: Ints, *, unbiased: bool, eps: float) -> Floats:
    """(value - mean) / (deviation + eps) over values with the same index; 0 without variance."""
    centered = center_by(values, index)
    counts = np.bincount(index)[index].astype(np.float64)
    squares = np.bincount(index, weights=centered * centered)[index]
    divisor = np.maximum(counts - 1.0, 1.0) if unbiased else counts
    deviation = np.sqrt(squares / divisor)
    return np.divide(centered, deviation + eps, out=np.zeros_like(centered), where=deviation > 0.0)


def weighted_moments(values: Floats, counts: Floats) -> tuple[float, float]:
    """Mean and unbiased variance over elements, `counts` of which have each value."""
    total = counts.sum()
    mean = (counts * values).sum() / max(total, 1.0)
    variance = (counts * (values - mean) ** 2).sum() / max(total - 1.0, 1.0)
    return float(mean), float(variance)
