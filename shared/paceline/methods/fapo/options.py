"""Options of `fapo`; no numpy here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2",))
class FapoOptions(StrictModel):
    """Options of `fapo`."""

    flaw: str = Field(max_length=253)
    """The part of the reward that flags a flawed episode by a value above 0.5; of weight 0."""
    penalty: float = Field(default=1.0, ge=0.0)
    """Subtracted from the reward of correct episodes that are flagged."""
    correct: float = 0.0
    """Rewards above it are correct; no others are penalised."""
    eps: float = Field(default=1e-6, ge=0.0)
