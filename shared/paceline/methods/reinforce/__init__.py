"""REINFORCE (Williams 1992): the policy gradient without ratio and without clipping.

`is_ratio: true` multiplies by the ratio to the proximal policy, which for `proximal: {kind:
behaviour}` is the unbounded importance weight that M2PO and VCPO control. The recipe has the
truncated weight, as its episodes are older than the policy.
"""

from __future__ import annotations

from paceline.plugins import Method, Plugin, StrictModel


class ReinforceOptions(StrictModel):
    """Options of `reinforce`."""

    is_ratio: bool = False
    """Whether the loss is `-r A` with the ratio to the proximal policy, or `-A log p`."""


METHOD = Method(
    stage="control",
    evidence="code",
    parts={"surrogates": {"reinforce": Plugin(".surrogate:reinforce", ReinforceOptions)}},
)
