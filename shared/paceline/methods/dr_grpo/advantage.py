"""Dr.GRPO (Understanding R1-Zero-like training, arXiv 2503.20783, section 3)."""

from __future__ import annotations

from paceline.methods.parts.group_statistics import Floats, Ints, center_by_group


def dr_grpo(rewards: Floats, groups: Ints, lengths: Ints) -> Floats:
    """R - mean of the group, without division by the standard deviation."""
    del lengths
    centered, _, _ = center_by_group(rewards, groups)
    return centered
