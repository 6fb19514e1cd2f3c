"""Options of `mssr` and `mssr_entropy`; neither torch nor numpy here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.plugins import StrictModel, declares


@declares(needs=("memory",))
class MssrOptions(StrictModel):
    """Options of `mssr`."""

    least: float = Field(default=0.875, gt=0.0, lt=1.0)
    """Smallest factor by which the weight of old outcomes falls with each new one."""
    most: float = Field(default=0.96, gt=0.0, lt=1.0)
    """Largest factor."""
    target_kl: float = Field(default=0.01, gt=0.0)
    """At this KL the policy counts as changing fast."""
    rule: Literal["monotone", "released"] = "monotone"
    """`monotone`: the larger the KL, the smaller the factor, as the paper says. `released`: as the
    code, whose factor rises with the KL up to the target and is the smallest above."""
    metric: str = Field(default="kl_behaviour", max_length=64)
    """The number of the trainer that is taken as KL; in the release that to the reference."""
    window: int = Field(default=20, ge=1, le=20)
    """Over how many of its last steps its mean is taken."""
    initial: float = Field(default=0.5, ge=0.0, le=1.0)
    """Success rate of a prompt that was never seen."""
    success: float = 0.5
    """Rewards above it are successes."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least: {self.least} is above most, {self.most}")
        return self


def _entropy(options: Mapping[str, Any]) -> tuple[str, ...]:
    return () if options.get("entropy") == "sampled" else ("entropy",)


@declares(needs=_entropy)
class MssrEntropyOptions(StrictModel):
    """Options of `mssr_entropy`."""

    scale: float = Field(default=0.4, ge=0.0)
    """Factor of the entropy that is added to the advantage."""
    bound: float = Field(default=2.0, gt=1.0)
    """At most the absolute advantage divided by this is added, so that no sign changes."""
    entropy: Literal["full", "sampled"] = "full"
    """Of the whole distribution, or -p log p of the sampled token, as in the release."""
