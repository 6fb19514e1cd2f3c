"""Options of `dart_trim`; no numpy here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2",))
class DartTrimOptions(StrictModel):
    """Options of `dart_trim`."""

    keep: int = Field(ge=2, le=4096)
    """Episodes of each group that train."""
    success: float = 0.5
    """Rewards above it are successes."""
