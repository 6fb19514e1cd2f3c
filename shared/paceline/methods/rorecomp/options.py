"""Options of `rorecomp`; no numpy here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2",))
class RorecompOptions(StrictModel):
    """Options of `rorecomp`."""

    share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Of the successes, and of the failures, of a group that are its priority; rounded up."""
    every: int = Field(default=4, ge=2, le=1_000_000)
    """At every so many steps the others train instead."""
    success: float = 0.5
    """Rewards above it are successes."""
