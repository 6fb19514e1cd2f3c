"""The order of tasks, and the sampler's state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidError
from paceline.generation.samplers.shuffle import Shuffle
from paceline.plugins import Pick
from paceline_experience.ledger.task_cursor import Draw, TaskCursor, stable_seed


def positions(sampler: Shuffle, count: int) -> list[int | None]:
    return [sampler.next() for _ in range(count)]


def test_every_task_once_per_epoch_then_nothing() -> None:
    sampler = Shuffle(5, seed=3, epochs=2)
    first, second = positions(sampler, 5), positions(sampler, 5)
    assert sorted(map(str, first)) == sorted(map(str, second)) == list("01234")
    assert first != second
    assert positions(sampler, 2) == [None, None]


def test_order_depends_on_seed_and_epoch_only() -> None:
    assert positions(Shuffle(50, seed=1), 120) == positions(Shuffle(50, seed=1), 120)
    assert positions(Shuffle(50, seed=1), 50) != positions(Shuffle(50, seed=2), 50)


def test_the_order_is_frozen() -> None:
    assert positions(Shuffle(6, seed=0), 6) == [0, 2, 1, 3, 4, 5]


@given(st.integers(1, 30), st.integers(0, 70), st.integers(1, 20))
def test_a_restored_state_continues_the_order(size: int, done: int, more: int) -> None:
    sampler = Shuffle(size, seed=5)
    positions(sampler, done)
    other = Shuffle(size, seed=5)
    other.load(sampler.state())
    assert positions(other, more) == positions(sampler, more)


@given(st.integers(1, 2**62), st.integers(), st.integers(0, 2**62))
def test_the_order_of_any_number_of_tasks_needs_no_memory(size: int, seed: int, at: int) -> None:
    sampler = Shuffle(size, seed=seed)
    sampler.load({"epoch": 3, "cursor": at % size})
    found = positions(sampler, min(20, size))
    assert all(position is not None and 0 <= position < size for position in found)
    assert len(set(found[: size - at % size])) == len(found[: size - at % size])


@given(st.integers(1, 300), st.integers(0, 5))
def test_an_epoch_contains_every_task_once(size: int, seed: int) -> None:
    sampler = Shuffle(size, seed=seed)
    for _ in range(2):
        assert sorted(map(str, positions(sampler, size))) == sorted(map(str, range(size)))


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(InvalidError, match="empty"):
        Shuffle(0)


def test_cursor_repeats_a_task_that_infrastructure_failed_on() -> None:
    cursor = TaskCursor(Shuffle(2, epochs=1))
    drawn = [cursor.draw(), cursor.draw()]
    assert cursor.draw() is None
    assert cursor.exhausted
    assert drawn[0] is not None
    cursor.requeue(Draw(0, drawn[0].position, 1, pick="{}", seen=True))
    other = TaskCursor(Shuffle(2, epochs=1))
    other.load(cursor.state())
    assert not cursor.exhausted
    again = cursor.draw()
    assert again == other.draw() == Draw(0, drawn[0].position, 1, pick="{}", seen=True)
    assert again is not None
    assert (drawn[0].name, again.name) == ("0", "0.1")


class Verbose:
    """Picks with a variant of a given length, and a cursor of another."""

    def __init__(self, variant: int, cursor: int) -> None:
        self._variant, self._cursor = "v" * variant, cursor

    def next(self) -> Pick:
        return Pick(3, self._variant, {"half": 0.5})

    def state(self) -> dict[str, Any]:
        return {"at": "x" * self._cursor}

    def load(self, state: Mapping[str, Any]) -> None:
        del state


def test_picks_and_cursors_are_bounded() -> None:
    cursor = TaskCursor(Verbose(900, 900))
    drawn = cursor.draw()
    assert drawn is not None
    assert json.loads(drawn.pick) == {"variant": "v" * 900, "meta": {"half": 0.5}}
    too_wordy = TaskCursor(Verbose(1100, 0), kind="verbose")
    assert too_wordy.draw() is None
    assert "verbose: ValueError: a pick has 11" in too_wordy.problem
    too_large = TaskCursor(Verbose(0, 1100), kind="verbose")
    assert "its state has 1110 bytes; at most 1024 are allowed" in too_large.problem


def test_seeds_are_stable() -> None:
    assert stable_seed(7, "train", 3) == stable_seed(7, "train", 3)
    assert stable_seed(7, "train", 3) != stable_seed(7, "train", 4)
    assert 0 <= stable_seed("x") < 1 << 63
