"""GAPO: group adaptive policy optimization for code editing (arXiv 2510.21830).

Noisy outliers of execution-based rewards shift the mean; the baseline is the median of the densest
interval of the group's rewards instead. With as many successes as failures the lower cluster wins,
so failures get no gradient then.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2",))
class GapoOptions(StrictModel):
    """Options of `gapo`."""

    tau: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of the rewards that the densest interval has."""
    center: Literal["median", "mean"] = "median"
    """Statistic of the interval that serves as its centre."""
    scale: bool = True
    """Divide by the deviation of all rewards from that centre."""


METHOD = Method(
    stage="control",
    evidence="code",
    claim="up to +4.4 points of exact match over GRPO and DAPO in code editing",
    parts={"advantages": {"gapo": Plugin(".advantage:gapo", GapoOptions)}},
)
