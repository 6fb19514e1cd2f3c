"""Options of `ppo_clip`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.methods.parts.options import ClipOptions


class PpoClipOptions(ClipOptions):
    """Options of `ppo_clip`."""

    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound of the loss where the advantage is negative, in multiples of it; null: none."""
