"""REINFORCE (Williams 1992): the policy gradient without ratio and without clipping.

`is_ratio: true` multiplies by the ratio to the proximal policy, which for `proximal: {kind:
behaviour}` is the unbounded importance weight that M2PO and VCPO control. The recipe has the
truncated weight, as its episodes are older than the policy.
"""

from paceline.plugins import Method

METHOD = Method(stage="control", evidence="code")
