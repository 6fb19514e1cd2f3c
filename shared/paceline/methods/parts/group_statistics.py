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
