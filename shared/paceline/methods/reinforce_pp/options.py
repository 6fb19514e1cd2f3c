"""Options of `reinforce_pp` and `reinforce_pp_baseline`; no numpy here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


class ReinforcePpOptions(StrictModel):
    """Options of `reinforce_pp`."""

    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount of the reward for each policy token that follows."""
    center: bool = True
    """Subtract the mean over all tokens, as in the release."""


@declares(needs=("group>=2",))
class ReinforcePpBaselineOptions(StrictModel):
    """Options of `reinforce_pp_baseline`."""

    center: bool = True
    """Subtract the mean over all tokens, as in the release; groups in which all episodes have the
    same reward then get an advantage other than 0."""
