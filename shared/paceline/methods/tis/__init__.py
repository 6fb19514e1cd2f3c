"""Truncated importance sampling between engine and trainer.

The clipped surrogate times min(proximal / behaviour, cap): corrects for tokens that the inference
engine sampled with other numerics or older weights, with bounded variance.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel


class TisOptions(StrictModel):
    """Options of `tis`."""

    cap: float = Field(default=2.0, gt=0.0)
    level: Literal["token", "sequence"] = "token"
    """`sequence`: the product over a sequence is the weight of all its tokens."""
    normalise: bool = False
    """Divide by the mean weight of the update's tokens, or of its sequences if `level` is
    `sequence`, so that the step does not shrink or grow (verl's `rollout_is_batch_normalize`)."""


METHOD = Method(
    stage="control",
    evidence="code",
    claim="training with the log-probs of another engine stays stable",
    parts={"corrections": {"tis": Plugin(".correction:tis", TisOptions)}},
)
