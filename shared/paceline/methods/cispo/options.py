"""Options of `cispo`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("ratio",))
class CispoOptions(StrictModel):
    """Options of `cispo`: bounds of the weight, 1 - low to 1 + high."""

    low: float = Field(default=1.0, ge=0.0)
    """1 or more: no lower bound, as in the paper."""
    high: float = Field(default=0.2, ge=0.0)
