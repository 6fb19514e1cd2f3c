"""Options of `dr_grpo`; no numpy here."""

from __future__ import annotations

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2",))
class DrGrpoOptions(StrictModel):
    """`dr_grpo` has no options."""
