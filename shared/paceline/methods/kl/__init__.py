"""KL to a reference policy as a part of the loss.

Estimators k1, k2 and k3 are those of Schulman's note (2020). Differentiated, k1 has no gradient in
expectation, k2 has the gradient of the KL, k3 that of the KL in the other direction; `k3_k2` has
the value of k3 and the gradient of k2, and is the one to use. The reference policy is the job's
initial model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


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


METHOD = Method(
    stage="control",
    evidence="code",
    parts={
        "shapings": {"kl_penalty": Plugin(".shaping:kl_penalty", KlPenaltyOptions)},
        "regularisers": {"kl": Plugin(".regulariser:kl", KlOptions)},
    },
)
