"""GDPO: group reward-decoupled normalization policy optimization (arXiv 2601.05242).

Summing the parts of a reward before normalising gives different combinations the same advantage.
Here each part is normalised over its group, then the weighted sum over the batch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares

Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


@declares(needs=("group>=2",))
class GdpoOptions(StrictModel):
    """Options of `gdpo`."""

    weights: dict[str, Weight] = Field(default_factory=dict, max_length=32)
    """Weights of the reward's parts, by name; parts that are not named have weight 1."""
    over: Literal["episodes", "tokens"] = "episodes"
    """Unit over which the batch is normalised: `episodes` (reference) or `tokens` (verl)."""
    eps: float = Field(default=1e-4, ge=0.0)


METHOD = Method(
    stage="control",
    evidence="code",
    claim="up to +6.3 points on AIME over GRPO with several rewards",
    parts={"advantages": {"gdpo": Plugin(".advantage:gdpo", GdpoOptions)}},
)
