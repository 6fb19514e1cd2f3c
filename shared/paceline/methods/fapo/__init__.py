"""FAPO: flawed-aware policy optimization (arXiv 2510.22543).

Answers that are right by luck or by flawed steps are reinforced like sound ones. A part of the
reward that flags them lowers their reward before the group is normalised; early in training, when
few answers are right, flawed ones still get a positive advantage.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2",))
class FapoOptions(StrictModel):
    """Options of `fapo`."""

    flaw: str = Field(max_length=253)
    """The part of the reward that flags a flawed episode by a value above 0.5; of weight 0."""
    penalty: float = Field(default=1.0, ge=0.0)
    """Subtracted from the reward of correct episodes that are flagged."""
    correct: float = 0.0
    """Rewards above it are correct; no others are penalised."""
    eps: float = Field(default=1e-6, ge=0.0)


METHOD = Method(
    stage="control",
    evidence="code",
    claim="higher accuracy with fewer flawed answers, and no longer ones",
    parts={"advantages": {"fapo": Plugin(".advantage:fapo", FapoOptions)}},
)
