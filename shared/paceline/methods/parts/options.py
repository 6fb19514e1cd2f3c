"""Options that several methods share; they are checked at submit, so nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("ratio",))
class ClipOptions(StrictModel):
    """Bounds of a clipped ratio, 1 - low to 1 + high."""

    low: float = Field(default=0.2, ge=0.0)
    high: float = Field(default=0.2, ge=0.0)


class AggregationOptions(StrictModel):
    """What the denominator counts."""

    denominator: Literal["before_masks", "after_masks"] = "before_masks"
    """Whether tokens to which the corrections give weight 0 count. `before_masks`: they do, so the
    step shrinks with the share of masked tokens; `after_masks`: what is left weighs more."""


class SumNormOptions(AggregationOptions):
    """Options of `seq_mean_token_sum_norm`."""

    norm: int = Field(gt=0, le=1 << 31)
    """The constant, e.g. the longest generation; it must not vary between batches."""
