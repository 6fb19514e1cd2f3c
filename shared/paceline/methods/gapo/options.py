"""Options of `gapo`; no numpy here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2",))
class GapoOptions(StrictModel):
    """Options of `gapo`."""

    tau: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of the rewards that the densest interval has."""
    center: Literal["median", "mean"] = "median"
    """What is taken of the interval."""
    scale: bool = True
    """Divide by the deviation of all rewards from that centre."""
