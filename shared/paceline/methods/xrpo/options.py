"""Options of `xrpo_novelty`; no numpy here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2", "tokens"))
class XrpoNoveltyOptions(StrictModel):
    """Options of `xrpo_novelty`."""

    scale: float = Field(default=2.5, ge=0.0)
    """Factor of the novelty."""
    bound: float = Field(default=0.5, ge=0.0)
    """At most this share of the advantage is added."""
