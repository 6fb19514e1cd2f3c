"""Turn-level credit: each turn is compared with all turns of its group by its return to go.

The plain form of what multi-turn methods such as MAPO refine: the reward of the environment at a
turn and later ones, plus that of the episode at its last turn.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2", "turns"))
class TurnLevelOptions(StrictModel):
    """Options of `turn_level`."""

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount of the reward of each later turn."""
    outcome: float = Field(default=1.0, ge=0.0)
    """Weight of the episode's own reward, which is added to its last turn."""


METHOD = Method(
    stage="control",
    evidence="reconstructed",
    parts={"advantages": {"turn_level": Plugin(".advantage:turn_level", TurnLevelOptions)}},
)
