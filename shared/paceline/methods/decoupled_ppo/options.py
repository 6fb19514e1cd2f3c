"""Options of `behaviour_weight`; no torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.plugins import StrictModel


class BehaviourWeightOptions(StrictModel):
    """Options of `behaviour_weight`."""

    level: Literal["token", "sequence"] = "token"
    """`sequence`: the geometric mean over a sequence is the weight of all its tokens."""
    lower: float | None = Field(default=None, ge=0.0)
    upper: float | None = Field(default=5.0, gt=0.0)
    """Bounds of the weight; null: none."""
    action: Literal["mask", "clamp"] = "mask"
    """Out of bounds: a weight of 0, or the nearest bound."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> BehaviourWeightOptions:
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower: {self.lower} is above upper {self.upper}")
        return self
