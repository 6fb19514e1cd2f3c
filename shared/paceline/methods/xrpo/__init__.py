"""XRPO: a planner of rollouts, and novelty-aware sharpening of advantages (arXiv 2510.06672).

Equal numbers of rollouts waste them on prompts of which all is known: more go where they narrow the
interval of the mean reward most. Equal credit for all correct answers ignores the novel ones:
correct answers that the policy finds less likely than others of their group get more; this follows
another advantage.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="generate",
    evidence="notes",
    claim="up to +4 pass@1 and 2.7 times faster convergence, with seeded prompts",
)
