"""RLOO (Ahmadian et al., arXiv 2402.14740, section 3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_experience.advantages.grouped import Floats, centred


def rloo(rewards: Any, groups: Any, lengths: Any) -> Floats:
    """R - mean of the others of the group; 0 for an episode without others."""
    del lengths
    off, _, sizes = centred(rewards, groups)
    return off * sizes / np.maximum(sizes - 1.0, 1.0)
