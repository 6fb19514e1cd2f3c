"""IcePop: tokens on which engine and trainer disagree too much do not train.

Ring-1T report of the Ling team (arXiv 2510.18855); verl's preset "decoupled token IcePop". No ratio
is clamped: outside its bounds a token has weight 0, inside it keeps its importance weight.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel


class IcePopOptions(StrictModel):
    """Options of `icepop`."""

    lower: float = Field(default=0.5, ge=0.0, le=1.0)
    upper: float = Field(default=5.0, ge=1.0)
    """Bounds of proximal / behaviour."""


METHOD = Method(
    stage="control",
    evidence="code",
    claim="mixture-of-experts models train stably in spite of engine mismatch",
    parts={"corrections": {"icepop": Plugin(".correction:icepop", IcePopOptions)}},
)
