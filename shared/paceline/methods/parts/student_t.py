"""Quantiles of Student's t distribution, for intervals of means."""

from __future__ import annotations

import math
from functools import cache

_ROUNDS = 60  # of the bisection: to the precision of a double


@cache
def quantile(probability: float, freedom: int) -> float:
    """The t below which a share of the distribution with `freedom` degrees lies.

    `probability` is at least 0.5 and less than 1.
    """
    low, high = 0.0, 1.0
    while distribution(high, freedom) < probability:
        high *= 2.0
    for _ in range(_ROUNDS):
        middle = 0.5 * (low + high)
        if distribution(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def distribution(t: float, freedom: int) -> float:
    """The share below `t` >= 0, by the finite series for whole degrees of freedom >= 1.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    cos, odd = math.cos(angle), freedom % 2
    term = cos if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    inner = math.sin(angle) * total
    within = (angle + inner) * 2.0 / math.pi if odd else inner
    return 0.5 + 0.5 * within
