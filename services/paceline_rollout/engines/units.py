"""Numbers that depend on a seed and a position only, so that they are the same in every process."""

from __future__ import annotations

from typing import Any

import numpy as np

MASK = (1 << 64) - 1


def unit(seed: int, position: int) -> float:
    """A number in [0, 1), a pure function of seed and position."""
    x = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


def units(seed: Any, positions: Any) -> Any:
    """`unit` over an array of positions."""
    start = np.uint64((int(seed) * 0x9E3779B97F4A7C15) & MASK)
    x = start + (positions + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
