"""MAPO, later MICA: multi-turn advantages for subjective dialogue (arXiv 2603.06194).

Without a single terminal reward, each turn is compared with the same turn of the other episodes of
its group, and with all turns of the group.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2", "turns"))
class MapoOptions(StrictModel):
    """Options of `mapo`."""

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)  # not stated in the paper
    turn: float = Field(default=0.5, ge=0.0)
    """Weight of the comparison with the same turn of the group's other episodes."""
    group: float = Field(default=0.5, ge=0.0)
    """Weight of the comparison with all turns."""
    scope: Literal["group", "batch"] = "group"
    """Scope of the second comparison; the first version of the paper compares over the batch."""
    signal: Literal["reward", "return"] = "reward"
    """Quantity that the second comparison compares."""


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="+15 to +43 points on an empathy benchmark (7B to 32B)",
    parts={"advantages": {"mapo": Plugin(".advantage:mapo", MapoOptions)}},
)
