"""Options of the method's parts, checked at submit: neither numpy nor torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("memory",))
class RarityOptions(StrictModel):
    """Options of `rarity`."""

    power: float = Field(default=0.5, ge=0.0, le=1.0)
    """Advantages are divided by the number of times that a task was seen, to this power."""


class NearOptions(StrictModel):
    """Options of `near`."""

    width: float = Field(default=0.5, gt=0.0)
    """Log-ratio at which the weight of a token has fallen to 1/e."""
