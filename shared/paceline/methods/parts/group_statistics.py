"""Group statistics shared by the advantage estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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


def center_by_group(rewards: Any, groups: Any) -> tuple[Floats, NDArray[np.intp], Floats]:
    """Rewards minus the mean of their group, and the group index and group size of each."""
    values = check(rewards)
    _, inverse = np.unique(np.asarray(groups), return_inverse=True)
    sizes = np.bincount(inverse).astype(np.float64)
    means = np.bincount(inverse, weights=values) / sizes
    centered = values - means[inverse]
    # Equal rewards leave rounding errors, which division by a tiny deviation would amplify.
    centered[np.abs(centered) < 1e-12 * np.maximum(1.0, np.abs(values))] = 0.0
    return centered, inverse, sizes[inverse]


def index_of(labels: Any) -> tuple[Ints, int]:
    """The number of each label's set, from 0, and the number of sets; order of labels."""
    found, inverse = np.unique(np.asarray(labels), return_inverse=True)
    return inverse.reshape(-1).astype(np.int64), len(found)


def mean_by(values: Floats, index: Ints) -> Floats:
    """The mean over all values with the same index, for each value."""
    counts = np.bincount(index)
    return (np.bincount(index, weights=values) / np.maximum(counts, 1))[index]


def z_by(values: Floats, index: Ints, *, unbiased: bool, eps: float) -> Floats:
    """(value - mean) / (deviation + eps) over values with the same index; 0 without variance."""
    if not len(values):
        return values.copy()
    centered = values - mean_by(values, index)
    centered[np.abs(centered) < 1e-12 * np.maximum(1.0, np.abs(values))] = 0.0
    counts = np.bincount(index)[index].astype(np.float64)
    squares = np.bincount(index, weights=centered * centered)[index]
    divisor = np.maximum(counts - 1.0, 1.0) if unbiased else counts
    deviation = np.sqrt(squares / divisor)
    return np.divide(centered, deviation + eps, out=np.zeros_like(centered), where=deviation > 0.0)
