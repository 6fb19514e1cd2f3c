"""Options of `reinforce`, in a module that the gateway can import without torch."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel


class ReinforceOptions(StrictModel):
    """Options of `reinforce`."""

    cap: float = Field(default=2.0, gt=0.0)
    """Largest importance weight."""
