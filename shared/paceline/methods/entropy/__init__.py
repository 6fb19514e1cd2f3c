"""Entropy bonus: keeps the policy from collapsing (A3C, arXiv 1602.01783, section 4).

Of the full distribution, which the trainer computes with the log-probs, in chunks.
"""

from paceline.plugins import Method

METHOD = Method(stage="control", evidence="code")
