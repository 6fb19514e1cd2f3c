"""Options of `rloo`; no numpy here."""

from __future__ import annotations

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2",))
class RlooOptions(StrictModel):
    """`rloo` has no options."""
