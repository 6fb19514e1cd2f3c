"""UI-S1: semi-online reinforcement learning for GUI agents (arXiv 2509.11543).

The advantage of a turn adds a comparison of its discounted return with the same turn of the group
and one of the episode. The release compares the turn's own score where the paper compares the
return of the whole episode.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


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
    """Compare the scores of single turns, or the sums over the turns of an episode."""
    scale: bool = True
    """Divide by the standard deviation."""


METHOD = Method(
    stage="control",
    evidence="code",
    claim="+12.0 on AndroidWorld and +23.8 on AITW over the 7B base model",
    parts={"advantages": {"ui_s1": Plugin(".advantage:ui_s1", UiS1Options)}},
)
