"""GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

from paceline.methods.parts.group_statistics import Floats, check, index_of, z_by
from paceline.plugins import Context, EpisodeBatch


def grpo(batch: EpisodeBatch, context: Context, *, eps: float = 1e-6) -> Floats:
    """(R - mean) / (std + eps), with the sample standard deviation; 0 without variance."""
    del context
    return z_by(check(batch.rewards), index_of(batch.groups), unbiased=True, eps=eps)
