"""Options of `minpro`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel


class MinproOptions(StrictModel):
    """Options of `minpro`: bounds of the weight, 1 - low to 1 + high."""

    low: float = Field(default=1.0, ge=0.0)
    """1 or more: no lower bound."""
    high: float = Field(default=0.28, ge=0.0)
    include_one: bool = False
    """Bound the minimum over the prefix by 1, so that it never amplifies (not in the paper)."""
