"""A filter and an advantage of a job.

They run beside the ledger, in a sealed process of the job, with numpy.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.plugins import Advantages, Context, Drop, EpisodeBatch, FinishedGroup, Keep, declares


def spread(group: FinishedGroup, *, least: Annotated[float, Field(ge=0)] = 0.05) -> Keep | Drop:
    """Drop groups whose rewards lie close together: they say little about what is better."""
    if max(group.rewards) - min(group.rewards) < least:
        return Drop("spread")
    return Keep()


@declares(needs=("group>=2", "memory"))
def smoothed(
    batch: EpisodeBatch, context: Context, *, decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
) -> Advantages:
    """The reward minus the mean of its group, over a deviation that is averaged over the steps."""
    values = batch.rewards - _group_means(batch)
    now = float(np.sqrt(np.mean(values**2)))
    before = float(context.memory.get("deviation", now))
    deviation = decay * before + (1 - decay) * now
    return Advantages(
        values / (deviation + 1e-6),
        memory={"deviation": deviation},
        notes={"advantage_deviation": deviation},
    )


def _group_means(batch: EpisodeBatch) -> NDArray[np.float64]:
    """The mean reward of the group of each episode, [N]."""
    _, index = np.unique(batch.groups, return_inverse=True)
    return (np.bincount(index, batch.rewards) / np.bincount(index))[index]
