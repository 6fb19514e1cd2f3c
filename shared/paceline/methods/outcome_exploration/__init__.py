"""Outcome-based exploration (arXiv 2509.06941): bonuses for answers that are rare.

RL collapses the diversity of final answers, even of prompts that are not solved. Historical bonuses
count the answers of a prompt across steps; the batch bonus compares the answers of a group. It
follows another advantage. The paper excludes the tokens of the answer itself; here all tokens get
the bonus.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2", "memory"))
class OutcomeExplorationOptions(StrictModel):
    """Options of `outcome_exploration`."""

    coef: float = Field(gt=0.0)  # not stated in the paper; start with 0.1 to 0.2
    bonus: Literal["naive", "ucb_mean", "ucb_con", "batch"] = "ucb_con"
    """`naive`: 1/sqrt(n) of an answer seen n times; `ucb_mean`: minus the mean of the others of the
    group; `ucb_con`: minus `constant`; `batch`: minus the share of equal answers in the group."""
    constant: float = Field(default=0.5, ge=0.0, le=1.0)
    correct: float = 0.5
    """Rewards above it are correct; a group in which all are gets no bonus."""


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="more distinct answers of 8 (2.88 to 2.93, batch bonus 3.23) at better pass@k",
    parts={
        "advantages": {
            "outcome_exploration": Plugin(
                ".advantage:outcome_exploration", OutcomeExplorationOptions
            )
        },
    },
)
