"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071, section 4).

Token ratios are noisy single-sample weights, which explode in mixture-of-experts models. GSPO clips
the geometric mean of a sequence's ratios, the same for all of its tokens; its bounds are therefore
hundreds of times narrower. Aggregate with `seq_mean_token_mean`.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("ratio",))
class GspoOptions(StrictModel):
    """Options of `gspo`: bounds of the sequence ratio, 1 - low to 1 + high."""

    low: float = Field(default=3e-4, ge=0.0)
    high: float = Field(default=4e-4, ge=0.0)


METHOD = Method(
    stage="control",
    evidence="code",
    claim="stable training of mixture-of-experts models without routing replay",
    parts={"surrogates": {"gspo": Plugin(".surrogate:gspo", GspoOptions)}},
)
