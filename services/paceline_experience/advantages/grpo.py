"""GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_experience.advantages.grouped import Floats, centred


def grpo(rewards: Any, groups: Any, lengths: Any, *, eps: float = 1e-6) -> Floats:
    """(R - mean) / (std + eps) with the sample deviation of the group; 0 without variance."""
    del lengths
    off, inverse, sizes = centred(rewards, groups)
    squares = np.bincount(inverse, weights=off * off)[inverse]
    std = np.sqrt(squares / np.maximum(sizes - 1.0, 1.0))
    return off / (std + eps)
