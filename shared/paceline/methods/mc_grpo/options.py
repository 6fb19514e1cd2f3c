"""Options of `mc_grpo`; no numpy here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2",))
class McGrpoOptions(StrictModel):
    """Options of `mc_grpo`."""

    guard: bool = True
    """Divide by the standard deviation where the median deviation is 0, as it mostly is with
    rewards of 0 and 1; the release divides by 0.001."""
    clip: float = Field(default=5.0, gt=0.0)
    """Largest absolute advantage, if `guard` is set."""
    rescale: bool = False
    """As the release: multiply by the size of the group over its advantages that are not 0."""
