"""Dr.GRPO (Understanding R1-Zero-like training, arXiv 2503.20783, section 3)."""

from __future__ import annotations

from typing import Any

from paceline_experience.advantages.grouped import Floats, centred


def dr_grpo(rewards: Any, groups: Any, lengths: Any) -> Floats:
    """R - mean of the group, without division by its deviation."""
    del lengths
    off, _, _ = centred(rewards, groups)
    return off
