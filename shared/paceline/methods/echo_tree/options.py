"""Options of `echo_hybrid`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel, declares


@declares(needs=("entropy", "whole_batch"))
class EchoHybridOptions(StrictModel):
    """Options of `echo_hybrid`."""

    scale: float = Field(default=0.2, ge=0.0)
    alpha: float = Field(default=0.5, ge=0.0)
    """Weight of the entropy of a token, relative to the largest of the update."""
    beta: float = Field(default=0.5, ge=0.0)
    """Weight of what the sequence lacks in confidence, its mean probability of sampled tokens."""
