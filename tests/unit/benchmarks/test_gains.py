"""The interval of a gain over seeds and tasks."""

from __future__ import annotations

import random

from learning.environments import interval


def test_an_interval_covers_seeds_and_tasks() -> None:
    chance = random.Random(0)
    noisy = [[chance.choice([0.0, 1.0]) for _ in range(200)] for _ in range(3)]
    low, high = interval(noisy, draws=2000)
    assert low < sum(map(sum, noisy)) / 600 < high
    # Tasks alone: about 4 standard errors of 0.5 / sqrt(600).
    assert 0.06 < high - low < 0.16
    apart = [[gain] * 200 for gain in (0.0, 0.5, 1.0)]
    assert interval(apart, draws=2000) == (0.0, 1.0)
    assert interval([[0.25] * 200] * 3, draws=100) == (0.25, 0.25)
