"""Options of `turn_level`; no numpy here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2", "turns"))
class TurnLevelOptions(StrictModel):
    """Options of `turn_level`."""

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount of the reward of each later turn."""
    outcome: float = Field(default=1.0, ge=0.0)
    """Weight of the episode's own reward, which is added to its last turn."""
