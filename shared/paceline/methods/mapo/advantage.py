"""MAPO (arXiv 2603.06194, version 3, section 3)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, check, index_of, z_by
from paceline.methods.parts.turns import on_tokens, same_turn, to_go, turns_of
from paceline.plugins import Context, EpisodeBatch

_EPS = 1e-8


def mapo(
    batch: EpisodeBatch,
    context: Context,
    *,
    gamma: float = 1.0,
    turn: float = 0.5,
    group: float = 0.5,
    scope: str = "group",
    signal: str = "reward",
) -> Floats:
    """`turn` x z-score of the return at the turn + `group` x z-score over all turns, [T]."""
    del context
    turns = turns_of(batch)
    rewards = check(turns.rewards)
    returns = to_go(rewards, turns, gamma=gamma)
    groups = batch.groups[turns.episodes]
    own = index_of(groups if scope == "group" else np.zeros_like(groups))
    compared = rewards if signal == "reward" else returns
    advantages = turn * z_by(returns, same_turn(groups, turns), unbiased=False, eps=_EPS)
    advantages += group * z_by(compared, own, unbiased=False, eps=_EPS)
    return on_tokens(advantages, turns, batch)
