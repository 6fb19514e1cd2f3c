"""Rarity: tasks that were trained often weigh less (an example, not a published method).

A counter of each task, kept across steps, divides its advantages by the square root of how often
the task was seen; a correction lowers the weight of tokens whose policy has moved on.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("memory",))
class RarityOptions(StrictModel):
    """Options of `rarity`, checked at submit: neither numpy nor torch here."""

    power: float = Field(default=0.5, ge=0.0, le=1.0)
    """Advantages are divided by the number of times that a task was seen, to this power."""


class NearOptions(StrictModel):
    """Options of `near`."""

    width: float = Field(default=0.5, gt=0.0)
    """Log-ratio at which the weight of a token has fallen to 1/e."""


METHOD = Method(
    stage="control",
    evidence="reconstructed",
    claim="none; it shows all parts",
    parts={
        "advantages": {"rarity": Plugin(".advantage:rarity", RarityOptions)},
        "corrections": {"near": Plugin(".correction:near", NearOptions)},
    },
)
