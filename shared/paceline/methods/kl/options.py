"""Options of `kl`; no torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("reference",))
class KlOptions(StrictModel):
    """Options of `kl`."""

    estimator: Literal["k1", "k2", "k3", "k3_k2"] = "k3_k2"
    coef: float = Field(gt=0.0)
    corrected: bool = True
    """Multiply by the corrections' weights; without them the estimate is biased on stale data."""
    ratio: bool = False
    """Multiply by the ratio to the proximal policy, which carries a gradient: with `k3` the
    unbiased estimate of DeepSeek-V3.2 (arXiv 2512.02556) and TRL's `use_bias_correction_kl`."""


@declares(needs=("reference",))
class KlPenaltyOptions(StrictModel):
    """Options of `kl_penalty`."""

    coef: float = Field(gt=0.0)
