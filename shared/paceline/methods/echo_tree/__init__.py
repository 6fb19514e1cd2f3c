"""ECHO: entropy-confidence hybrid optimisation for test-time RL (arXiv 2602.02150).

Of its parts, the hybrid advantage: tokens at which the policy is uncertain weigh more. How entropy
and confidence are scaled is not stated in what could be read of the paper. Not to be confused with
ECHO-2, a system for distributed rollouts.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="reconstructed",
    claim="+3 to 4 points on average over INTUITOR, with its trees and adaptive clipping",
)
