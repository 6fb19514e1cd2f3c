"""VCPO: Stable Asynchrony, variance-controlled off-policy RL (arXiv 2602.17616).

With a large delay a few trajectories of huge importance weight dominate a step. VCPO scales the
learning rate of each update by the effective sample size of the sequence weights. Its second part,
a baseline of smallest variance from the gradient norms of single trajectories, is not built.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="27.8 on AIME 2025 in 2.5 times fewer GPU hours than synchronous; stable at a lag of 128",
)
