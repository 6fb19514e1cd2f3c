"""UI-S1 (arXiv 2509.11543, section 3; release: uis1/core_uis1.py)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, Ints, check, index_of, mean_by, z_by
from paceline.methods.parts.turns import on_tokens, turns_of
from paceline.plugins import Context, EpisodeBatch, Turns

_EPS = 1e-6


def ui_s1(
    batch: EpisodeBatch,
    context: Context,
    *,
    gamma: float = 0.5,
    step: float = 1.0,
    episode: float = 1.0,
    variant: str = "released",
    scale: bool = True,
) -> Floats:
    """`step` x advantage of the turn + `episode` x advantage of the episode, [T]."""
    del context
    turns = turns_of(batch)
    scores = check(turns.rewards)
    groups = batch.groups[turns.episodes]
    cells, _ = index_of(groups * (int(turns.indices.max()) + 1) + turns.indices)
    found = step * _compared(matched_returns(scores, turns, gamma=gamma), cells, scale=scale)
    if variant == "released":
        own, _ = index_of(groups)
        single = np.bincount(own)[own] == 1
        found += episode * np.where(single, scores, _compared(scores, own, scale=scale))
    else:
        count = len(batch.rewards)
        sums = np.zeros(count)
        np.add.at(sums, turns.episodes, scores)
        own, _ = index_of(batch.groups)
        found += episode * _compared(sums, own, scale=scale)[turns.episodes]
    return on_tokens(found, turns, batch)


def matched_returns(scores: Floats, turns: Turns, *, gamma: float) -> Floats:
    """The score of a turn, and the discounted return of the next one if it matches the expert."""
    found = scores.copy()
    for place in range(len(found) - 2, -1, -1):
        if turns.episodes[place] == turns.episodes[place + 1] and turns.matched[place]:
            # What follows a mismatch starts from 0, and so does what precedes it.
            found[place] += gamma * (found[place + 1] if turns.matched[place + 1] else 0.0)
    return found


def _compared(values: Floats, index: Ints, *, scale: bool) -> Floats:
    if not scale:
        return values - mean_by(values, index)
    return z_by(values, index, unbiased=True, eps=_EPS)
