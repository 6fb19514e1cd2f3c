"""FAPO (arXiv 2510.22543, section 3; release: verl-recipe fapo/reward_fn_reasoning.py)."""

from __future__ import annotations

import numpy as np

from paceline.errors import InvalidError
from paceline.methods.parts.group_statistics import check, index_of, z_by
from paceline.plugins import Advantages, Context, EpisodeBatch


def fapo(
    batch: EpisodeBatch,
    context: Context,
    *,
    flaw: str,
    penalty: float = 1.0,
    correct: float = 0.0,
    eps: float = 1e-6,
) -> Advantages:
    """GRPO on rewards that are lower for flawed episodes, [N].

    Raises:
        InvalidError: no episode has the part.
    """
    del context
    if flaw not in batch.parts:
        names = ", ".join(batch.parts) or "none, or only one"
        raise InvalidError(f"flaw: {flaw!r} is no part of the reward; parts: {names}")
    flawed = (np.nan_to_num(batch.parts[flaw]) > 0.5) & (batch.rewards > correct)
    rewards = check(batch.rewards) - penalty * flawed
    values = z_by(rewards, index_of(batch.groups), unbiased=True, eps=eps)
    share = float(flawed.mean()) if len(flawed) else 0.0
    return Advantages(values, notes={"flawed_share": share})
