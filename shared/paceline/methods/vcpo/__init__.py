"""VCPO: Stable Asynchrony, variance-controlled off-policy RL (arXiv 2602.17616).

With a large delay a few trajectories of huge importance weight dominate a step. VCPO scales the
learning rate of each update by the effective sample size of the sequence weights. Its second part,
a baseline of smallest variance from the gradient norms of single trajectories, is not built.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel


class VcpoStepOptions(StrictModel):
    """Options of `vcpo_step`."""

    base: float = Field(default=1.0, gt=0.0, le=1.0)
    """Effective share of the sequences at and above which the learning rate is not lowered; 0.55
    in the paper's runs with several turns."""
    rule: Literal["sqrt", "linear"] = "sqrt"


METHOD = Method(
    stage="control",
    evidence="code",
    claim="27.8 on AIME 2025 in 2.5 times fewer GPU hours than synchronous; stable at a lag of 128",
    parts={"hooks": {"vcpo_step": Plugin(".hook:vcpo_step", VcpoStepOptions)}},
)
