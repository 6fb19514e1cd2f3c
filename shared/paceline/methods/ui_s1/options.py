"""Options of `ui_s1`; no numpy here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("group>=2", "turns"))
class UiS1Options(StrictModel):
    """Options of `ui_s1`."""

    gamma: float = Field(default=0.5, ge=0.0, le=1.0)
    """Discount of the return, which ends at the first turn that does not match the expert."""
    step: float = Field(default=1.0, ge=0.0)
    """Weight of the comparison with the same turn of the group."""
    episode: float = Field(default=1.0, ge=0.0)
    """Weight of the comparison of episodes."""
    variant: Literal["released", "paper"] = "released"
    """What is compared of an episode: the score of each turn, or the sum over its turns."""
    scale: bool = True
    """Divide by the standard deviation."""
