"""PPO-EWMA (arXiv 2110.00641), with resets as in Missing Old Logits (arXiv 2605.12070).

Clips around an average of the weights of the last steps, which stands for the policies that sampled
a stale batch. It costs one copy of the weights in float32 and a forward pass, and starts again from
the present weights if too few tokens were active in a step.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


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


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="65.7 against 64.0 of decoupled PPO on tau2-retail (4B), 67.8 against 65.4 (30B-A3B)",
    parts={"proximals": {"ewma": Plugin(".proximal:ewma", EwmaOptions)}},
)
