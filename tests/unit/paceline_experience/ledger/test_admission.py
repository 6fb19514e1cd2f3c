"""Admission is arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_experience.ledger.admission import (
    AdmissionLimits,
    AdmissionLoad,
    bound,
    headroom,
    over_budget,
    serving_step,
)

LIMITS = AdmissionLimits(
    batch_groups=4, group_size=8, max_staleness=2, max_in_flight=None, payload_bytes=1000
)
EMPTY = AdmissionLoad(step=0, accepted_groups=0, open_groups=0, open_episodes=0, payload_bytes=0)


@pytest.mark.parametrize(("staleness", "step", "groups"), [(0, 0, 4), (2, 0, 12), (2, 5, 32)])
def test_bound(staleness: int, step: int, groups: int) -> None:
    limits = replace(LIMITS, max_staleness=staleness)
    assert bound(limits, step) == groups
    assert headroom(limits, replace(EMPTY, step=step)) == groups


def test_accepted_and_open_groups_use_it_up() -> None:
    assert headroom(LIMITS, replace(EMPTY, accepted_groups=7, open_groups=4)) == 1
    assert headroom(LIMITS, replace(EMPTY, accepted_groups=12, open_groups=4)) == 0


def test_episodes_in_flight_are_bounded() -> None:
    limits = replace(LIMITS, max_in_flight=20)
    assert headroom(limits, EMPTY) == 2
    assert headroom(limits, replace(EMPTY, open_groups=2, open_episodes=16)) == 0


def test_a_bound_below_one_group_still_lets_one_in() -> None:
    assert headroom(replace(LIMITS, max_in_flight=3), EMPTY) == 1


def test_payloads_that_are_there_or_coming_fill_the_budget() -> None:
    assert headroom(LIMITS, replace(EMPTY, payload_bytes=999)) == 12
    assert headroom(LIMITS, replace(EMPTY, payload_bytes=1000)) == 0
    coming = replace(EMPTY, payload_bytes=500, open_groups=1, episode_bytes=70.0)
    assert over_budget(LIMITS, coming)


@pytest.mark.parametrize(
    ("ages", "expected"),
    [
        ([], 7),  # nobody yet: the newest publication
        ([8], 8),
        ([7, 8], 7),
        ([2, 8], 8),  # beyond the bound: nothing of it can be trained
        ([1, 2], 2),
        ([11], 9),  # never ahead of the trainer
    ],
)
def test_new_episodes_are_as_old_as_the_weights_that_make_them(
    ages: list[int], expected: int
) -> None:
    assert serving_step(ages, newest=7, step=9, max_staleness=4) == expected
