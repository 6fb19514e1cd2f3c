"""What the estimators that compare the episodes of a group have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidError

Floats = NDArray[np.float64]


def check(rewards: Any) -> Floats:
    """Rewards as float64.

    Raises:
        InvalidError: one of them is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise InvalidError(
            f"reward of episode {bad[0]} of the batch is {values[bad[0]]}; rewards must be finite"
        )
    return values


def centred(rewards: Any, groups: Any) -> tuple[Floats, NDArray[np.intp], Floats]:
    """Rewards minus their group's mean; index of the group of each; size of the group of each."""
    values = check(rewards)
    _, inverse = np.unique(np.asarray(groups), return_inverse=True)
    sizes = np.bincount(inverse).astype(np.float64)
    means = np.bincount(inverse, weights=values) / sizes
    off = values - means[inverse]
    # Equal rewards leave rounding residue, which division by a tiny deviation would blow up.
    off[np.abs(off) < 1e-12 * np.maximum(1.0, np.abs(values))] = 0.0
    return off, inverse, sizes[inverse]
