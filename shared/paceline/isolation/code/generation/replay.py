"""What a replay is asked and answers, as JSON for one that came with a job; answers are checked."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import islice
from typing import Any

from paceline.plugins import MAX_GUESTS, Guest, Stored

_MOST_SHOWN = 8


def stored_fields(stored: Sequence[Stored]) -> list[list[Any]]:
    """Stored episodes as JSON."""
    return [[s.reward, s.step, s.answer, s.length, s.truncated, dict(s.parts)] for s in stored]


def stored_of(fields: Sequence[Sequence[Any]]) -> list[Stored]:
    """Stored episodes from JSON."""
    return [Stored(*each) for each in fields]


def guest_fields(guests: Sequence[Guest]) -> list[list[Any]]:
    """Guests as JSON."""
    return [[each.stored, each.replaces] for each in guests]


def guests_of(fields: Any) -> list[Guest]:
    """Guests from JSON, which are still to be checked.

    Raises:
        TypeError, ValueError: they are none.
    """
    return [Guest(stored, replaces) for stored, replaces in fields]


def checked_places(answer: Any, size: int) -> tuple[int, ...]:
    """Places of episodes of a group of this size, ascending.

    Raises:
        TypeError: one is not an integer.
        ValueError: they are not ascending, or out of range.
    """
    found = tuple(operator.index(place) for place in islice(answer, size + 1))
    if list(found) != sorted({*found}) or not all(0 <= place < size for place in found):
        raise ValueError(f"places {_shown(found)} of {size} episodes; ascending ones are due")
    return found


def checked_guests(answer: Any, size: int, num_stored: int) -> tuple[Guest, ...]:
    """Guests of a group of this size, from so many stored episodes.

    Raises:
        TypeError: one is no `Guest`.
        ValueError: one joins or is replaced twice, is out of range, or nothing of the group stays.
    """
    found = tuple(islice(answer, MAX_GUESTS + 1))
    for each in found:
        if not isinstance(each, Guest):
            raise TypeError(f"a guest of type {type(each).__name__}; Guest is needed")
    joins = [operator.index(each.stored) for each in found]
    leaves = [operator.index(each.replaces) for each in found if each.replaces is not None]
    for places, below in ((joins, num_stored), (leaves, size)):
        if len({*places}) < len(places) or not all(0 <= place < below for place in places):
            raise ValueError(
                f"places {_shown(places)} of {below}; each once, from 0 to {below - 1}"
            )
    if len(found) > MAX_GUESTS or len(leaves) >= size:
        raise ValueError(
            f"{len(found)} guests that replace {len(leaves)} of {size} episodes; at most "
            f"{MAX_GUESTS} may join, and one of the group must stay"
        )
    return found


def _shown(places: Sequence[int]) -> str:
    """The first of some places; there may be hundreds."""
    more = ", ..." if len(places) > _MOST_SHOWN else ""
    return f"[{', '.join(map(str, places[:_MOST_SHOWN]))}{more}]"
