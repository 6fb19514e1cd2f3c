"""RLOO (Ahmadian et al., arXiv 2402.14740, section 3)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, Ints, center_by_group


def rloo(rewards: Floats, groups: Ints, lengths: Ints) -> Floats:
    """R - mean of the other episodes of the group; 0 for the only episode of a group."""
    del lengths
    centered, _, sizes = center_by_group(rewards, groups)
    return centered * sizes / np.maximum(sizes - 1.0, 1.0)
