"""Options of `mapo`; no numpy here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2", "turns"))
class MapoOptions(StrictModel):
    """Options of `mapo`."""

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)  # not stated in the paper
    turn: float = Field(default=0.5, ge=0.0)
    """Weight of the comparison with the same turn of the group's other episodes."""
    group: float = Field(default=0.5, ge=0.0)
    """Weight of the comparison with all turns."""
    scope: Literal["group", "batch"] = "group"
    """Of the second comparison; the first version of the paper compares over the batch."""
    signal: Literal["reward", "return"] = "reward"
    """What the second comparison compares."""
