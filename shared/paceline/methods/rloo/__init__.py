"""RLOO: Back to Basics (arXiv 2402.14740, section 3).

The baseline of each reward is the mean of the other rewards in its group, which is unbiased.
"""

from __future__ import annotations

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2",))
class RlooOptions(StrictModel):
    """`rloo` has no options."""


METHOD = Method(
    stage="control",
    evidence="code",
    claim="at least as good as PPO in preference tuning, with less memory",
    parts={"advantages": {"rloo": Plugin(".advantage:rloo", RlooOptions)}},
)
