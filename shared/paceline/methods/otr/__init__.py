"""OTR: One-Token Rollout (arXiv 2509.26313), supervised training as a policy gradient.

At each token of a demonstration the policy draws tokens from its own distribution; one that equals
the demonstration is rewarded, the others are pushed away a little. Constants are not stated in what
could be read of the paper. The recipe trains the episodes that succeed; rows of experts that are
collected elsewhere train the same way.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel


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


METHOD = Method(
    stage="control",
    evidence="reconstructed",
    claim="consistent gains over supervised fine-tuning on mathematics and code (3B, 7B)",
    parts={
        "advantages": {"supervised": Plugin(".advantage:supervised", SupervisedOptions)},
        "surrogates": {"otr": Plugin(".surrogate:otr", OtrOptions)},
    },
)
