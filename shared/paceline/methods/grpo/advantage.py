"""GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

import numpy as np

from paceline.methods.parts.group_statistics import Floats, center_by_group
from paceline.plugins import Context, EpisodeBatch


def grpo(batch: EpisodeBatch, context: Context, *, eps: float = 1e-6) -> Floats:
    """(R - mean) / (std + eps), with the sample standard deviation; 0 without variance."""
    del context
    centered, inverse, sizes = center_by_group(batch.rewards, batch.groups)
    squares = np.bincount(inverse, weights=centered * centered)[inverse]
    std = np.sqrt(squares / np.maximum(sizes - 1.0, 1.0))
    return centered / (std + eps)
