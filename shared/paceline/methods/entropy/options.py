"""Options of `entropy`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("entropy",))
class EntropyOptions(StrictModel):
    """Options of `entropy`."""

    coef: float = Field(gt=0.0)
