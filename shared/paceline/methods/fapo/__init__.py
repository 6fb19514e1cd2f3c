"""FAPO: flawed-aware policy optimization (arXiv 2510.22543).

Answers that are right by luck or by flawed steps are reinforced like sound ones. A part of the
reward that flags them lowers their reward before the group is normalised; early in training, when
few answers are right, flawed ones still get a positive advantage.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="higher accuracy with fewer flawed answers, and no longer ones",
)
