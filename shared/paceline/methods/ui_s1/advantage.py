"""UI-S1 (arXiv 2509.11543, section 3; release: uis1/core_uis1.py)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, Ints, center_by, check, index_of, z_by
from paceline.methods.parts.turns import on_tokens, same_turn, to_go, turns_of
from paceline.plugins import Context, EpisodeBatch

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
    # Returns start from 0 on both sides of a mismatch.
    returns = to_go(scores, turns, gamma=gamma, among=turns.matched)
    advantages = step * _relative(returns, same_turn(groups, turns), scale=scale)
    if variant == "released":
        own = index_of(groups)
        single = np.bincount(own)[own] == 1
        advantages += episode * np.where(
            single, scores / (1.0 + _EPS * scale), _relative(scores, own, scale=scale)
        )
    else:
        count = len(batch.rewards)
        sums = np.zeros(count)
        np.add.at(sums, turns.episodes, scores)
        own = index_of(batch.groups)
        advantages += episode * _relative(sums, own, scale=scale)[turns.episodes]
    return on_tokens(advantages, turns, batch)


def _relative(values: Floats, index: Ints, *, scale: bool) -> Floats:
    if not scale:
        return center_by(values, index)
    return z_by(values, index, unbiased=True, eps=_EPS)
