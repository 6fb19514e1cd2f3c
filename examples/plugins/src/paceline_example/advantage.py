"""An advantage estimator: how much better than expected each episode of a batch was."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.plugins import Context, EpisodeBatch

Floats = NDArray[np.float64]


def batch_mean(batch: EpisodeBatch, context: Context, *, limit: float = 5.0) -> Floats:
    """Reward minus the batch mean, divided by its deviation and clipped to `limit` [N].

    It ignores groups. One that compares the episodes of a group declares that with
    `paceline.plugins.declares(needs=("group>=2",))`.
    """
    del context
    off = batch.rewards - batch.rewards.mean()
    return np.clip(off / (batch.rewards.std() + 1e-6), -limit, limit)
