"""XRPO's novelty-aware sharpening (arXiv 2510.06672, section 3)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, index_of, mean_by
from paceline.methods.parts.previous import episode_advantages_before
from paceline.plugins import Context, EpisodeBatch


def xrpo_novelty(
    batch: EpisodeBatch, context: Context, *, scale: float = 2.5, bound: float = 0.5
) -> Floats:
    """A + min(max(scale x (1 - likelihood), 0), bound x A) where A is positive, [N].

    The likelihood of an answer is the exponential of its mean log-prob minus that of its group.

    Raises:
        InvalidError: no part with a value for each episode comes before.
    """
    del context
    before = episode_advantages_before(batch)
    assert batch.logprobs is not None
    ends = batch.starts
    sums = np.add.reduceat(np.append(batch.logprobs, 0.0), ends[:-1]) * (batch.lengths > 0)
    likely = sums / np.maximum(batch.lengths, 1)
    # An episode without a policy token has no likelihood, and no part in that of its group.
    known, index = batch.lengths > 0, index_of(batch.groups)
    likely[known] -= mean_by(likely[known], index[known])
    novelty = scale * (1.0 - np.exp(likely))
    added = np.minimum(np.maximum(novelty, 0.0), bound * before)
    return np.where(before > 0, before + added, before)
