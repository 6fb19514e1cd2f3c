"""Decoupled PPO: AReaL (arXiv 2505.24298, section 5.2).

Clips around the policy at the start of the step, and weights tokens by its ratio to the behaviour
policy, which separates the correction of stale samples from the trust region.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.plugins import Method, Plugin, StrictModel


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


METHOD = Method(
    stage="control",
    evidence="code",
    claim="up to 2.77 times faster than synchronous systems at equal or better accuracy",
    parts={
        "corrections": {
            "behaviour_weight": Plugin(".correction:behaviour_weight", BehaviourWeightOptions)
        },
    },
)
