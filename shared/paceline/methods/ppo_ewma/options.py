"""Options of `ewma`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("weight_average",))
class EwmaOptions(StrictModel):
    """Options of `ewma`."""

    window: float = Field(default=4.0, gt=0.0)
    """Steps of staleness that the average stands for; the mean age of its weights is half of it."""
    reset_below: float = Field(default=0.9, ge=0.0, le=1.0)
    """It starts again after a step with a smaller share of active tokens: kept by all corrections
    and not clipped."""

    @property
    def beta(self) -> float:
        """Factor by which the weight of a step falls with each later one."""
        return self.window / (self.window + 2.0)
