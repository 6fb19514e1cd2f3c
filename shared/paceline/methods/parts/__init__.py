"""Building blocks of methods: batches, surrogates, aggregation, group statistics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Plugin, Plugins, StrictModel, declares


@declares(needs=("ratio",))
class ClipOptions(StrictModel):
    """Bounds of a clipped ratio, 1 - low to 1 + high."""

    low: float = Field(default=0.2, ge=0.0)
    high: float = Field(default=0.2, ge=0.0)


class AggregationOptions(StrictModel):
    """Options of the aggregations: which tokens the denominator counts."""

    denominator: Literal["before_masks", "after_masks"] = "before_masks"
    """Whether tokens to which the corrections give weight 0 count. `before_masks`: they do, so the
    step shrinks with the share of masked tokens; `after_masks`: what is left weighs more."""


class SumNormOptions(AggregationOptions):
    """Options of `seq_mean_token_sum_norm`."""

    norm: int = Field(gt=0, le=1 << 31)
    """The constant, e.g. the longest generation; it must not vary between batches."""


PLUGINS = Plugins(
    {
        "proximals": {
            "batch": Plugin(".proximal:batch", StrictModel),
            "behaviour": Plugin(".proximal:behaviour", StrictModel),
        },
        "aggregations": {
            "token_mean": Plugin(".aggregation:token_mean", AggregationOptions),
            "seq_mean_token_sum": Plugin(".aggregation:seq_mean_token_sum", AggregationOptions),
            "seq_mean_token_mean": Plugin(".aggregation:seq_mean_token_mean", AggregationOptions),
            "seq_mean_token_sum_norm": Plugin(
                ".aggregation:seq_mean_token_sum_norm", SumNormOptions
            ),
        },
    }
)
