"""REINFORCE++: a simple and efficient approach for aligning LLMs (arXiv 2501.03262).

Normalises over all tokens of the batch instead of the group, so it also works with groups of one;
normalising each prompt alone overfits easy and hard ones. The baseline variant subtracts the
group's mean first.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


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


METHOD = Method(
    stage="control",
    evidence="code",
    claim="as stable as PPO without a critic, also with groups of one",
    parts={"advantages": {"reinforce_pp": Plugin(".advantage:reinforce_pp", ReinforcePpOptions)}},
)

BASELINE = Method(
    stage="control",
    evidence="code",
    claim="as reinforce_pp, for groups with sparse rewards",
    recipe="recipe_baseline.yaml",
    parts={
        "advantages": {
            "reinforce_pp_baseline": Plugin(
                ".advantage:reinforce_pp_baseline", ReinforcePpBaselineOptions
            )
        },
    },
)
