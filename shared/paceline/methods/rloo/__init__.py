"""RLOO: Back to Basics (arXiv 2402.14740, section 3).

The baseline of each reward is the mean of the other rewards in its group, which is unbiased.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="at least as good as PPO in preference tuning, with less memory",
)
