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


@declares(needs=("entropy", "whole_batch"))
class DartStepsOptions(StrictModel):
    """Options of `dart_steps`."""

    share: float = Field(default=0.8, gt=0.0, le=1.0)
    """Of the turns of the update, those with the highest mean entropy of their tokens."""
