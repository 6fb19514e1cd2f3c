"""When a job ends, and who is told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from paceline.config.base import Seconds
from paceline.config.evaluation import MAX_STEPS, Steps
from paceline.plugins import StrictModel

Level = Annotated[float, Field(ge=-1e12, le=1e12)]


class StopCondition(StrictModel):
    """A metric that ends the job once it has been above or below a level."""

    model_config = ConfigDict(serialize_by_alias=True)

    metric: str = Field(max_length=256, pattern="^(train|eval)/[^/ ]+(/[^/ ]+)*$")
    """Name as in trackers: `train/NAME`, `eval/NAME` of the evaluation in `eval`, or
    `eval/EVALUATION/NAME` of one in `evals`. A row without it is passed over."""
    above: Level | None = None
    """The condition holds above this level, which itself does not count."""
    below: Level | None = None
    """Likewise below it; a condition has one of both."""
    rows: int = Field(default=1, gt=0, le=MAX_STEPS, alias="for")
    """Rows in a row: steps, or complete evaluations."""
    end: Literal["succeeded", "failed"] = "succeeded"
    """How the job ends: a goal is met, or a guard has found that it goes wrong."""

    @model_validator(mode="after")
    def _has_one_level(self) -> StopCondition:
        if (self.above is None) == (self.below is None):
            raise ValueError("above: or `below`, and not both, is needed")
        return self

    def holds(self, value: float) -> bool:
        """Whether a value is beyond the level."""
        return value > self.above if self.above is not None else value < (self.below or 0.0)

    def __str__(self) -> str:
        side, level = ("above", self.above) if self.above is not None else ("below", self.below)
        rows = f" for {self.rows} rows" if self.rows > 1 else ""
        return f"{self.metric} {side} {level:g}{rows}"


class StopSpec(StrictModel):
    """Conditions that end the job with success; the first one that is met counts."""

    steps: Steps = 200
    """Trainer steps."""
    eval_reward: Level | None = None
    """Mean reward of a complete evaluation."""
    wall_s: Seconds | None = None
    """Seconds since the job started, without the time that it was paused."""
    when: tuple[StopCondition, ...] = Field(default=(), max_length=32)
    """Further conditions, on any metric; these can also end the job as failed."""

    def unknown(self, evaluations: dict[str, Any]) -> str:
        """The problem of a metric, given the job's evaluations by name; empty: none."""
        for number, condition in enumerate(self.when):
            kind, *path = condition.metric.split("/")
            where = f"stop.when.{number}.metric: {condition.metric!r}"
            if kind != "eval":
                continue
            if len(path) > 1 and path[0] not in evaluations:
                named = ", ".join(sorted(filter(None, evaluations))) or "none"
                return f"{where}: {path[0]!r} is not an evaluation of `evals`; there are: {named}"
            if len(path) == 1 and "" not in evaluations:
                return f"{where}: the job has no `eval`; name one of `evals`: eval/EVALUATION/NAME"
        return ""


class NotifySpec(StrictModel):
    """Who is told when the job has ended."""

    webhook: str = Field(max_length=2048, pattern="^https?://[^ ]+$")
    """URL of a host that the installation allows; gets a POST with JSON."""
    secret: str = Field(default="", max_length=64, pattern="^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")
    """Name of the tenant's secret that signs it; unsigned if empty."""
