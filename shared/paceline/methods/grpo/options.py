"""Options of the objective and of the advantage `grpo`; neither torch nor numpy here."""

from __future__ import annotations

from pydantic import Field

from paceline.methods.parts.options import Aggregation, RatioOptions
from paceline.plugins import StrictModel, declares


@declares(needs=lambda options: ("reference",) if options.get("kl") else ())
class GrpoOptions(RatioOptions):
    """Options of `grpo`."""

    aggregation: Aggregation = "seq_mean_token_mean"
    kl: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference policy, estimated by k3."""


@declares(needs=("group>=2",))
class GrpoAdvantageOptions(StrictModel):
    """Options of the advantage `grpo`."""

    eps: float = Field(default=1e-6, ge=0.0)
