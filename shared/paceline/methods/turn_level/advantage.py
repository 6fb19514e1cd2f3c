"""Turn-level credit."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, check, index_of, z_by
from paceline.methods.parts.turns import on_tokens, to_go, turns_of
from paceline.plugins import Context, EpisodeBatch

_EPS = 1e-6


def turn_level(
    batch: EpisodeBatch, context: Context, *, gamma: float = 1.0, outcome: float = 1.0
) -> Floats:
    """The z-score of a turn's return over all turns of its group, [T]."""
    del context
    turns = turns_of(batch)
    rewards = check(turns.rewards).copy()
    last = np.append(turns.episodes[1:] != turns.episodes[:-1], True)
    rewards[last] += outcome * check(batch.rewards)[turns.episodes[last]]
    groups = index_of(batch.groups[turns.episodes])
    returns = to_go(rewards, turns, gamma=gamma)
    return on_tokens(z_by(returns, groups, unbiased=True, eps=_EPS), turns, batch)
