"""Options of `otr` and `supervised`; neither torch nor numpy here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel


class OtrOptions(StrictModel):
    """Options of `otr`."""

    mode: Literal["deterministic", "sampled"] = "deterministic"
    """`deterministic`: the expectation over all tokens that could be drawn, without noise."""
    samples: int = Field(default=256, ge=1, le=4096)
    """Tokens that are drawn at each position, if `sampled`."""
    beta: float = Field(default=-0.1, ge=-1.0, le=1.0)
    """Reward of a token that differs from the demonstration."""
    kappa: float = Field(default=1.3, gt=0.0, le=10.0)
    """Temperature at which tokens are drawn."""


class SupervisedOptions(StrictModel):
    """Options of `supervised`."""

    success: float = 0.5
    """Episodes with a reward above it are demonstrations; the others do not train."""
