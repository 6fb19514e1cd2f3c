"""MinPRO: A Step Back, prefix importance ratios (arXiv 2601.22718).

The correct off-policy weight of a token is the product of the ratios of its prefix, which explodes;
the usual ratio ignores the prefix. MinPRO multiplies a token's ratio by the smallest ratio before
it. The paper's clip bounds are not known to us; the defaults follow CISPO with 0.28.
Use it with `proximal: {kind: behaviour}`.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel


class MinproOptions(StrictModel):
    """Options of `minpro`: bounds of the weight, 1 - low to 1 + high."""

    low: float = Field(default=1.0, ge=0.0)
    """1 or more: no lower bound."""
    high: float = Field(default=0.28, ge=0.0)
    include_one: bool = False
    """Bound the minimum over the prefix by 1, so that it never amplifies (not in the paper)."""


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="above GRPO, GSPO, CISPO and M2PO with two or more steps of delay (8B, 14B)",
    parts={"surrogates": {"minpro": Plugin(".surrogate:minpro", MinproOptions)}},
)
