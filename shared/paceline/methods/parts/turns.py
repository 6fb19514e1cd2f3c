"""Values of turns, and their spread over the policy tokens of a batch."""

from __future__ import annotations

import numpy as np

from paceline.errors import InvalidError
from paceline.methods.parts.group_statistics import Bools, Floats, Ints, index_of
from paceline.plugins import EpisodeBatch, Turns


def turns_of(batch: EpisodeBatch) -> Turns:
    """The turns of a batch.

    Raises:
        InvalidError: there are none.
    """
    if batch.turns is None or not len(batch.turns.episodes):
        raise InvalidError("no episode of the batch has policy tokens")
    return batch.turns


def same_turn(groups: Ints, turns: Turns) -> Ints:
    """An index that is equal for turns at the same position in episodes of the same group, [K].

    `groups` [K] are those of the turns.
    """
    return index_of(groups * (int(turns.indices.max()) + 1) + turns.indices)


def to_go(values: Floats, turns: Turns, *, gamma: float, among: Bools | None = None) -> Floats:
    """Discounted sums of the values of a turn and all later ones of its episode, [K].

    With `among` [K], a turn adds those of the next one only if it holds for both.
    """
    follows = turns.episodes[:-1] == turns.episodes[1:]
    if among is not None:
        follows &= among[:-1] & among[1:]
    returns = values.astype(np.float64, copy=True)
    for place in np.flatnonzero(follows)[::-1].tolist():
        returns[place] += gamma * returns[place + 1]
    return returns


def on_tokens(values: Floats, turns: Turns, batch: EpisodeBatch) -> Floats:
    """The value of each policy token's turn, [T]; 0 outside of turns."""
    per_token = np.zeros(int(batch.lengths.sum()))
    for value, start, end in zip(values, turns.starts, turns.ends, strict=True):
        per_token[start:end] = value
    return per_token
