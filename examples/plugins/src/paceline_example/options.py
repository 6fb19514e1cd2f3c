"""Options of `capped`, in a module that the gateway can import without torch."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel


class CappedOptions(StrictModel):
    """Options of `capped`."""

    cap: float = Field(default=2.0, gt=0.0)
    """Largest importance weight."""
