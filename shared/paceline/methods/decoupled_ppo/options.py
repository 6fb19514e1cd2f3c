"""Options of `decoupled_ppo`; no torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.methods.parts.options import ClipOptions


class DecoupledOptions(ClipOptions):
    """Options of `decoupled_ppo`."""

    weight: bool = True
    """Multiply by proximal / behaviour."""
    level: Literal["token", "sequence"] = "token"
    """`sequence`: the geometric mean over a sequence is the weight of all its tokens."""
    lower: float | None = Field(default=None, ge=0.0)
    upper: float | None = Field(default=5.0, gt=0.0)
    """Bounds of the weight; null: none."""
    action: Literal["mask", "clamp"] = "mask"
    """Out of bounds: no loss (the denominator stays), or the nearest bound."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> DecoupledOptions:
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower: {self.lower} is above upper {self.upper}")
        return self
