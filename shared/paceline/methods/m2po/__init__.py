"""M2PO: Prosperity before Collapse (arXiv 2510.01161, section 4).

With data that is hundreds of updates old, clipping ratios removes most informative tokens. M2PO
bounds the second moment of the log-ratio over the tokens that clipping could affect, and masks as
few tokens as that takes. Use it with `proximal: {kind: behaviour}`, without a clipping surrogate.

Three algorithms have this name: `m2po` is the paper's, `m2po_prox_mask` AReaL's (blind to the sign
of the advantage, on the proximal policy), and the surrogate `m2po_cap` solves exactly for the clip
bounds that the release searches for.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("whole_batch",))
class M2poOptions(StrictModel):
    """Options of `m2po`, `m2po_prox_mask` and `m2po_cap`."""

    tau: float = Field(default=0.04, gt=0.0)
    """Bound of the mean squared log-ratio; 0.04 in all of the paper's runs."""


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="at 256 updates of delay as good as without delay (1.7B to 32B)",
    parts={
        "corrections": {
            "m2po": Plugin(".correction:m2po", M2poOptions),
            "m2po_prox_mask": Plugin(".correction:m2po_prox_mask", M2poOptions),
        },
    },
)

RELEASE = Method(
    stage="control",
    evidence="code",
    claim="as m2po; the release clips where the paper masks",
    recipe="recipe_release.yaml",
    parts={"surrogates": {"m2po_cap": Plugin(".surrogate:m2po_cap", M2poOptions)}},
)
