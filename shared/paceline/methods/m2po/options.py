"""Options of M2PO's corrections and surrogate; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("whole_batch",))
class M2poOptions(StrictModel):
    """Options of `m2po`, `m2po_prox_mask` and `m2po_cap`."""

    tau: float = Field(default=0.04, gt=0.0)
    """Bound of the mean squared log-ratio; 0.04 in all of the paper's runs."""
