"""Values of turns, and their spread over the policy tokens of a batch."""

from __future__ import annotations

import numpy as np

from paceline.errors import InvalidError
from paceline.methods.parts.group_statistics import Floats
from paceline.plugins import EpisodeBatch, Turns


def turns_of(batch: EpisodeBatch) -> Turns:
    """The turns of a batch.

    Raises:
        InvalidError: no episode has any; the environment marks no turns.
    """
    if batch.turns is None or not len(batch.turns.episodes):
        raise InvalidError("no episode of the batch has a turn; the environment must mark turns")
    return batch.turns


def to_go(values: Floats, turns: Turns, *, gamma: float) -> Floats:
    """Discounted sums of the values of a turn and all later ones of its episode, [K]."""
    found = values.astype(np.float64, copy=True)
    for place in range(len(found) - 2, -1, -1):
        if turns.episodes[place] == turns.episodes[place + 1]:
            found[place] += gamma * found[place + 1]
    return found


def on_tokens(values: Floats, turns: Turns, batch: EpisodeBatch) -> Floats:
    """The value of each policy token's turn, [T]; 0 outside of turns."""
    found = np.zeros(int(batch.lengths.sum()))
    for value, start, end in zip(values, turns.starts, turns.ends, strict=True):
        found[start:end] = value
    return found
