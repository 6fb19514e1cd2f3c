"""Options of `reinforce`; no torch here."""

from __future__ import annotations

from paceline.plugins import StrictModel


class ReinforceOptions(StrictModel):
    """Options of `reinforce`."""

    is_ratio: bool = False
    """Whether the loss is `-r A` with the ratio to the proximal policy, or `-A log p`."""
