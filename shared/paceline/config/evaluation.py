"""The sections `eval` and `evals` of a job file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from paceline.config.base import Options
from paceline.plugins import StrictModel

MAX_STEPS = 1_000_000
MAX_EVAL_SAMPLES = 1024
HOUR_S, DAY_S = 3600.0, 86400.0
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]
SampleCounts = Annotated[
    tuple[Annotated[int, Field(gt=0, le=MAX_EVAL_SAMPLES)], ...], Field(max_length=16)
]


class EvalSpec(StrictModel):
    """Held-out evaluation on one set of tasks; `options` are merged over those of `tasks`."""

    every: Steps = 20
    """Interval in trainer steps; version 0 and the last version are evaluated too."""
    tasks: int = Field(default=100, gt=0, le=1_000_000)
    """Number of tasks, always the same ones."""
    options: Options = Field(default_factory=dict)
    """Merged over `tasks.options`, for instance `{split: heldout}`."""
    source: Options = Field(default_factory=dict)
    """Merged over the options of `tasks.source`."""
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """0 is greedy."""
    samples: int = Field(default=1, gt=0, le=MAX_EVAL_SAMPLES)
    """Episodes of each task, with distinct seeds; several need a temperature above 0."""
    pass_at: SampleCounts = ()
    """Report pass@k for these k: the unbiased estimate, from all samples, of the probability that
    at least one of k is right (arXiv 2107.03374)."""
    majority_at: SampleCounts = ()
    """Report maj@k for these k: the share of tasks of which the most frequent normalised answer of
    the first k samples is right; among equally frequent ones that which came first."""
    pass_reward: float = Field(default=1.0, ge=-1e12, le=1e12)
    """A sample is right for `pass_at` and `majority_at` if its reward is at least this."""
    seed: Seed = 1
    """Seed of the order of tasks, and of all episodes."""
    timeout_s: float = Field(default=120.0, gt=0, le=7 * DAY_S)
    """Episodes that have not finished by then are dropped and counted."""

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalSpec:
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(
                f"samples: {self.samples} with temperature 0 are all the same; allowed: 1, or a "
                "temperature above 0"
            )
        for name, counts in (("pass_at", self.pass_at), ("majority_at", self.majority_at)):
            if counts and (max(counts) > self.samples or len(set(counts)) < len(counts)):
                raise ValueError(
                    f"{name}: {[*counts]} with samples {self.samples}; allowed: 1 to "
                    f"{self.samples}, each once"
                )
        return self
