"""RLOO (Ahmadian et al., arXiv 2402.14740, section 3)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, center_by, check, index_of
from paceline.plugins import Context, EpisodeBatch


def rloo(batch: EpisodeBatch, context: Context) -> Floats:
    """R - mean of the other episodes of the group; 0 for the only episode of a group."""
    del context
    index = index_of(batch.groups)
    centered = center_by(check(batch.rewards), index)
    sizes = np.bincount(index)[index]
    return centered * sizes / np.maximum(sizes - 1.0, 1.0)
