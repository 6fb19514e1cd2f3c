"""BAPO: adaptive clip bounds (arXiv 2510.18927, algorithm 1).

Off-policy batches are dominated by tokens of negative advantage, and fixed symmetric bounds block
positive tokens of low probability, so entropy collapses. BAPO raises the bounds of each update,
step by step, until the positive tokens contribute a given share of the loss.

`measure: surrogate` is the paper's. A clipped negative token counts with a larger value there than
an unclipped one, so that raising the lower bound moves the share away from its target; `gradient`
counts tokens that carry a gradient, with which both moves lead to the target.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.plugins import Method, Plugin, StrictModel, declares

MAX_RAISES = 1000  # each is a reduction over all ranks


@declares(needs=("ratio", "whole_batch"))
class BapoOptions(StrictModel):
    """Options of `bapo`."""

    share: float = Field(default=0.4, gt=0.0, lt=1.0)
    """Target share of the positive tokens: 0.4 in the paper, 0.5 in the text of its repository."""
    measure: Literal["surrogate", "gradient"] = "surrogate"
    low: float = Field(default=0.6, gt=0.0, le=1.0)
    max_low: float = Field(default=0.9, gt=0.0, le=1.0)
    low_step: float = Field(default=0.02, gt=0.0)
    high: float = Field(default=1.2, ge=1.0)
    max_high: float = Field(default=3.0, ge=1.0)
    high_step: float = Field(default=0.05, gt=0.0)
    """Bounds of the ratio at the start, their ceilings, and the steps by which they are raised; the
    upper bound first, the lower once the upper is at its ceiling."""

    @model_validator(mode="after")
    def _ceilings_above(self) -> BapoOptions:
        for name in ("low", "high"):
            start, ceiling = getattr(self, name), getattr(self, f"max_{name}")
            if start > ceiling:
                raise ValueError(f"{name}: {start} is above max_{name} {ceiling}")
            step = getattr(self, f"{name}_step")
            if ceiling - start > MAX_RAISES * step:
                raise ValueError(
                    f"{name}_step: {step} needs more than {MAX_RAISES} steps to {ceiling}"
                )
        return self


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="87.1 % on AIME 2024 with 32B, 70.8 % with 7B",
    parts={"surrogates": {"bapo": Plugin(".surrogate:bapo", BapoOptions)}},
)
