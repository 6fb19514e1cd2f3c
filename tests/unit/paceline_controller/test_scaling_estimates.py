"""Means of noisy figures: how sure they are, and when they are another value."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_controller.scaling.estimates import Horizon, PerEvent

MEMORY = Horizon(seconds=60.0, events=32.0)


def after(values: list[float], mean: PerEvent | None = None) -> PerEvent:
    """Every value an event, half a minute apart."""
    found = mean or PerEvent()
    for value in values:
        found = found.add(value, 1.0, 30.0, MEMORY)
    return found


def noisy(value: float, number: int, seed: int) -> list[float]:
    made = random.Random(seed)
    return [value * made.gauss(1.0, 0.2) for _ in range(number)]


@settings(deadline=None)
@given(st.lists(st.floats(9.0, 11.0), min_size=2, max_size=20))
def test_a_few_events_have_a_plain_mean(values: list[float]) -> None:
    found = after(values)
    assert found.value == pytest.approx(statistics.fmean(values))
    assert found.share == pytest.approx(1 / len(values))


def test_one_event_may_be_off_and_equal_ones_make_sure() -> None:
    errors = [after([30.0] * number).error for number in range(1, 30)]
    assert errors[0] == pytest.approx(0.2)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


def test_the_error_is_as_large_as_means_differ() -> None:
    for number in (5, 20, 200):
        means = [after(noisy(30.0, number, seed)) for seed in range(200)]
        spread = statistics.stdev(mean.value for mean in means) / 30.0
        assert statistics.fmean(mean.error for mean in means) == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("seed", range(5))
def test_a_clear_change_is_believed_after_a_few_events(seed: int) -> None:
    before = after(noisy(30.0, 100, seed))
    assert before.value == pytest.approx(30.0, rel=0.15)
    changed = after(noisy(60.0, 8, seed + 100), before)
    assert changed.value == pytest.approx(60.0, rel=0.25)


def test_what_came_without_an_event_belongs_to_the_next() -> None:
    found = PerEvent().add(10.0, 0.0, 5.0, MEMORY).add(20.0, 1.0, 5.0, MEMORY)
    assert (found.value, found.pending) == (30.0, 0.0)
    assert not PerEvent().known
    assert PerEvent().error == 1.0
