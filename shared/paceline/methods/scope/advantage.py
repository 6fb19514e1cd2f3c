"""Credit of what episodes share with those that continue them."""

from __future__ import annotations

from typing import Literal

import numpy as np

from paceline.methods.parts.group_statistics import Floats
from paceline.methods.parts.previous import advantages_before
from paceline.plugins import Context, EpisodeBatch


def shared_prefix(
    batch: EpisodeBatch, context: Context, *, credit: Literal["best", "mean"] = "best"
) -> Floats:
    """The advantages of the part before; a token that others continue has theirs too, [T].

    It is trained once, in the first episode that has it. With `best` it has the largest advantage
    of all episodes with it: what led to a success is part of it, as in SCOPE, where the prefix and
    the corrected rest are one episode (arXiv 2602.24110). With `mean` it has their mean, as what
    rollouts share in ARPO (arXiv 2507.19849, hard advantage estimation).

    Raises:
        InvalidError: no part comes before.
    """
    del context
    before = advantages_before(batch)
    if batch.parents is None or batch.inherited is None:
        return before
    values = before if len(before) == batch.lengths.sum() else np.repeat(before, batch.lengths)
    advantages, counts = values.astype(np.float64), np.ones(len(values))
    starts, lengths = batch.starts, batch.lengths
    # Episodes that continue another one come after it.
    for child in np.flatnonzero(batch.parents >= 0)[::-1]:
        parent = batch.parents[child]
        size = min(batch.inherited[child], lengths[parent], lengths[child])
        ours = slice(starts[parent], starts[parent] + size)
        theirs = slice(starts[child], starts[child] + size)
        if credit == "best":
            advantages[ours] = np.maximum(advantages[ours], advantages[theirs])
        else:
            advantages[ours] += advantages[theirs]
            counts[ours] += counts[theirs]
    return advantages / counts
