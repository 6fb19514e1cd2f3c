"""IcePop: tokens on which engine and trainer disagree too much do not train.

Ring-1T report of the Ling team (arXiv 2510.18855); verl's preset "decoupled token IcePop". No ratio
is clamped: outside its bounds a token has weight 0, inside it keeps its importance weight.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="mixture-of-experts models train stably in spite of engine mismatch",
)
