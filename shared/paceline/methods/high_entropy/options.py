"""Options of `high_entropy`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("entropy", "whole_batch"))
class HighEntropyOptions(StrictModel):
    """Options of `high_entropy`."""

    share: float = Field(default=0.2, gt=0.0, le=1.0)
    """Of the tokens of the update, those with the highest entropy; at least one."""
