"""Options of the advantage `grpo`; neither torch nor numpy here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2",))
class GrpoAdvantageOptions(StrictModel):
    """Options of the advantage `grpo`."""

    eps: float = Field(default=1e-6, ge=0.0)
    deviation: Literal["group", "batch"] = "group"
    """Over which rewards the deviation is taken; the mean is always that of the group."""
