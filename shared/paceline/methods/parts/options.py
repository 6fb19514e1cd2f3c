"""Options of clipped surrogates; no torch here, since they are checked at submit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.plugins import StrictModel

Aggregation = Literal[
    "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]


class ClipOptions(StrictModel):
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


class RatioOptions(ClipOptions):
    """Options of a surrogate whose ratio may be taken to either of two policies."""

    old: Literal["behaviour", "proximal"] = "behaviour"
    """The policy in the ratio's denominator: the one that sampled, or the one at the start of the
    batch."""
