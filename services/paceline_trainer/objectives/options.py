"""Options of the objectives; they are checked at submit, so nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Closed

Aggregation = Literal[
    "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]


class ClipOptions(Closed):
    """Options of every clipped surrogate."""

    clip: float = Field(default=0.2, gt=0.0)
    clip_high: float | None = Field(default=None, gt=0.0)
    """Upper side; `clip` if null."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound of the loss where the advantage is negative, in multiples of it."""
    aggregation: Aggregation = "token_mean"
    norm: int | None = Field(default=None, gt=0)
    """Constant of `seq_mean_token_sum_norm`, e.g. the longest generation."""

    @model_validator(mode="after")
    def _norm_where_used(self) -> ClipOptions:
        needed = self.aggregation == "seq_mean_token_sum_norm"
        if needed != (self.norm is not None):
            verb = "is needed" if needed else "has no meaning"
            raise ValueError(f"norm: {verb} with aggregation {self.aggregation!r}")
        return self


class PpoClipOptions(ClipOptions):
    """Options of `ppo_clip`."""

    old: Literal["behaviour", "proximal"] = "behaviour"
    """Whose probabilities are the ratio's denominator: those of the policy that sampled, or those
    of the weights at the start of the batch."""


class GrpoOptions(PpoClipOptions):
    """Options of `grpo`."""

    aggregation: Aggregation = "seq_mean_token_mean"
    kl: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference policy, estimated by k3."""


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


class TisOptions(ClipOptions):
    """Options of `tis`."""

    cap: float = Field(default=2.0, gt=0.0)
    level: Literal["token", "sequence"] = "token"
    """`sequence`: the product over a sequence is the weight of all its tokens."""
