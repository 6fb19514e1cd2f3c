"""Options of `gspo`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("ratio",))
class GspoOptions(StrictModel):
    """Options of `gspo`: bounds of the sequence ratio, 1 - low to 1 + high."""

    low: float = Field(default=3e-4, ge=0.0)
    high: float = Field(default=4e-4, ge=0.0)
