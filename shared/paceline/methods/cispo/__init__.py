"""CISPO: MiniMax-M1 (arXiv 2506.13585, section 3.1).

PPO clipping removes the gradient of rare but decisive tokens. CISPO clips the importance weight
instead, without gradient, so that every token keeps one. The paper tunes only the upper bound and
does not state it; verl's example has 0.2, other code has caps of 4 to 5.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("ratio",))
class CispoOptions(StrictModel):
    """Options of `cispo`: bounds of the weight, 1 - low to 1 + high."""

    low: float = Field(default=1.0, ge=0.0)
    """1 or more: no lower bound, as in the paper."""
    high: float = Field(default=0.2, ge=0.0)


METHOD = Method(
    stage="control",
    evidence="code",
    claim="the accuracy of DAPO on AIME 2024 in half of the steps (32B)",
    parts={"surrogates": {"cispo": Plugin(".surrogate:cispo", CispoOptions)}},
)
