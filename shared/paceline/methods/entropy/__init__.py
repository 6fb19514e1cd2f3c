"""Entropy bonus: keeps the policy from collapsing (A3C, arXiv 1602.01783, section 4).

Of the full distribution, which the trainer computes with the log-probs, in chunks.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("entropy",))
class EntropyOptions(StrictModel):
    """Options of `entropy`."""

    coef: float = Field(gt=0.0)


METHOD = Method(
    stage="control",
    evidence="code",
    parts={"regularisers": {"entropy": Plugin(".regulariser:entropy", EntropyOptions)}},
)
