"""RLOO (Ahmadian et al., arXiv 2402.14740, section 3)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, center_by_group
from paceline.plugins import Context, EpisodeBatch


def rloo(batch: EpisodeBatch, context: Context) -> Floats:
    """R - mean of the other episodes of the group; 0 for the only episode of a group."""
    del context
    centered, _, sizes = center_by_group(batch.rewards, batch.groups)
    return centered * sizes / np.maximum(sizes - 1.0, 1.0)
