"""Options of `icepop`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel


class IcePopOptions(StrictModel):
    """Options of `icepop`."""

    lower: float = Field(default=0.5, ge=0.0, le=1.0)
    upper: float = Field(default=5.0, ge=1.0)
    """Bounds of proximal / behaviour."""
