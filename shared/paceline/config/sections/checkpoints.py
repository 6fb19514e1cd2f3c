"""The section `trainer.checkpoint` of a job file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from paceline.config.evaluation import EvalSpec, Steps
from paceline.plugins import StrictModel

_MEASURED = ("reward", "response_tokens_mean", "truncated_share")
_COUNTED = re.compile(r"(pass|maj)@([1-9][0-9]{0,3})")


class BestSpec(StrictModel):
    """Which checkpoint is the best: the first with the best value of an evaluation's metric."""

    eval: str = Field(default="", max_length=63)
    """Name of one of `evals`; the main evaluation if empty."""
    metric: str = Field(default="reward", max_length=64)
    """`reward`, `pass@k` or `maj@k` of the evaluation, `response_tokens_mean` or
    `truncated_share`."""
    direction: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best."""

    def value(self, measured: Mapping[str, Any]) -> float | None:
        """The metric in the result of a complete run; None: it was not measured."""
        number = measured.get(self.metric) if measured.get("complete") else None
        return float(number) if isinstance(number, int | float) and math.isfinite(number) else None

    def problem(self, evals: Mapping[str, EvalSpec], main: str | None) -> str:
        """Why the job cannot have such a best checkpoint; empty if it can."""
        name = self.eval or main
        if name is None:
            return ""  # nothing is evaluated, so none is the best
        if name not in evals:
            known = ", ".join(sorted(filter(None, evals))) or "none"
            return f"trainer.checkpoint.best.eval: {name!r} is not one of evals; these are: {known}"
        spec = evals[name]
        counts = {"pass": spec.pass_at, "maj": spec.majority_at}
        counted = _COUNTED.fullmatch(self.metric)
        if self.metric in _MEASURED or (counted and int(counted[2]) in counts[counted[1]]):
            return ""
        allowed = ", ".join(
            (
                *_MEASURED,
                *(f"pass@{k}" for k in spec.pass_at),
                *(f"maj@{k}" for k in spec.majority_at),
            )
        )
        return (
            f"trainer.checkpoint.best.metric: {self.metric!r} is not measured; allowed: {allowed}"
        )


class CheckpointSpec(StrictModel):
    """How often the trainer writes checkpoints, and which it keeps."""

    every: Steps = 20
    """Interval in trainer steps."""
    keep: int = Field(default=2, gt=0, le=1000)
    """The newest ones; `best` is kept beside them."""
    best: BestSpec | None = BestSpec()
    """The best of the steps with both a checkpoint and an evaluation; only the newest are kept
    if null."""
