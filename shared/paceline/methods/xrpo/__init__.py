"""XRPO: novelty-aware sharpening of advantages (arXiv 2510.06672).

Equal credit for all correct answers ignores the novel ones: correct answers that the policy finds
less likely than others of their group get more. It follows another advantage. The planner of
rollouts that the paper adds is not part of it.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="notes",
    claim="up to +4 pass@1 and 2.7 times faster convergence, with its planner of rollouts",
)
