"""Jobs that continue from a checkpoint of another job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from paceline.config.evaluation import MAX_STEPS
from paceline.plugins import StrictModel

# Fields that the ledger's memory and the checkpoint depend on.
FIXED = (
    *("model", "code", "data", "tasks.environment", "tasks.options", "tasks.source"),
    "tasks.transform",
    *("tasks.seed", "tasks.epochs", "experience.batch_groups", "experience.group_size"),
    *("experience.sampler", "experience.allocator", "experience.replay"),
    *("experience.advantage", "experience.advantage_shaping", "trainer.lora"),
)

FIXED_WEIGHTS = ("model", "trainer.lora")
"""Fields that the weights of a checkpoint depend on; a job that trains nothing needs no more."""


class ForkSpec(StrictModel):
    """Where the job continues: with the weights, optimizer, data position and memory of another.

    One of kind `eval` measures the weights, on any tasks.
    """

    job: str = Field(max_length=128)
    """Id of the other job."""
    step: Literal["latest", "best"] | Annotated[int, Field(gt=0, le=MAX_STEPS)] = "latest"
    """Step of a checkpoint that the other job keeps: a number, the `latest`, or the `best` by its
    `trainer.checkpoint.best`; replaced by its number when the job is accepted."""
    digest: str = Field(default="", max_length=64, pattern="^([0-9a-f]{64})?$")
    """SHA-256 of the checkpoint's index, which has the digests of its files; filled in likewise."""


def changed_fields(
    parent: Mapping[str, Any], child: Mapping[str, Any], fixed: Sequence[str] = FIXED
) -> list[str]:
    """Fields of a fork's job file that differ from its parent's, although they may not."""
    return [name for name in fixed if _value(parent, name) != _value(child, name)]


def _value(spec: Mapping[str, Any], path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = cast(Mapping[str, Any], value).get(name) if isinstance(value, Mapping) else None
    return value
