"""Episodes as demonstrations."""

from __future__ import annotations

import numpy as np

from paceline.plugins import Advantages, Context, EpisodeBatch


def supervised(batch: EpisodeBatch, context: Context, *, success: float = 0.5) -> Advantages:
    """1 for every episode, and weight 0 for those whose reward is not above `success`, [N]."""
    del context
    demonstrations = (batch.rewards > success).astype(np.float64)
    return Advantages(demonstrations, weights=demonstrations)
