"""Dr.GRPO (Understanding R1-Zero-like training, arXiv 2503.20783, section 3)."""

from __future__ import annotations

from paceline.methods.parts.group_statistics import Floats, center_by, check, index_of
from paceline.plugins import Context, EpisodeBatch


def dr_grpo(batch: EpisodeBatch, context: Context) -> Floats:
    """R - mean of the group, without division by the standard deviation."""
    del context
    return center_by(check(batch.rewards), index_of(batch.groups))
