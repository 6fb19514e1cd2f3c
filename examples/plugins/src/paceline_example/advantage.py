"""An advantage estimator: how much better than expected each episode of a batch was."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def batch_mean(rewards: Floats, groups: Ints, lengths: Ints, *, limit: float = 5.0) -> Floats:
    """Reward minus the mean of the batch, over its deviation, within `limit` [N].

    It looks at no groups, so it declares no need of them. What tells the options of one that does
    is decorated with `paceline.plugins.declares(needs=("group>=2",))`.
    """
    del groups, lengths
    off = rewards - rewards.mean()
    return np.clip(off / (rewards.std() + 1e-6), -limit, limit)
