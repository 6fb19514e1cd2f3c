"""Options of `ppo_clip`; no torch here."""

from __future__ import annotations

from paceline.methods.parts.options import RatioOptions


class PpoClipOptions(RatioOptions):
    """Options of `ppo_clip`."""
