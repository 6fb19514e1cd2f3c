"""ECHO: entropy-confidence hybrid optimisation for test-time RL (arXiv 2602.02150).

Of its parts, the hybrid advantage: tokens at which the policy is uncertain weigh more. How entropy
and confidence are scaled is not stated in what could be read of the paper. Not to be confused with
ECHO-2, a system for distributed rollouts.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("entropy", "whole_batch"))
class EchoHybridOptions(StrictModel):
    """Options of `echo_hybrid`."""

    scale: float = Field(default=0.2, ge=0.0)
    alpha: float = Field(default=0.5, ge=0.0)
    """Weight of the entropy of a token, relative to the largest of the update."""
    beta: float = Field(default=0.5, ge=0.0)
    """Weight of what the sequence lacks in confidence, its mean probability of sampled tokens."""


METHOD = Method(
    stage="control",
    evidence="reconstructed",
    claim="+3 to 4 points on average over INTUITOR, with its trees and adaptive clipping",
    parts={"shapings": {"echo_hybrid": Plugin(".shaping:echo_hybrid", EchoHybridOptions)}},
)
