"""MSSR: stable single-rollout RL with an entropy-shaped advantage (arXiv 2512.18215).

One rollout for each prompt instead of a group: the baseline is a Beta estimate of the prompt's
success rate that is kept across steps and forgets faster while the policy changes faster. The
shaping `mssr_entropy` guards exploration in the trainer. The recipe is the release: unlike in the
paper, its factor of forgetting rises with the KL to the reference up to the target (`rule`), and
its entropy is that of the sampled token. It begins without the release's pass over all prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.plugins import Method, Plugin, StrictModel, declares


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
    """Entropy of the whole distribution, or -p log p of the sampled token, as in the release."""


METHOD = Method(
    stage="control",
    evidence="code",
    claim="58.6 against 56.3 of GRPO on average (7B), at about half of the steps",
    parts={
        "advantages": {"mssr": Plugin(".advantage:mssr", MssrOptions)},
        "shapings": {"mssr_entropy": Plugin(".shaping:mssr_entropy", MssrEntropyOptions)},
    },
)
