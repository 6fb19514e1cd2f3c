"""The section `trainer.lora` of a job file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.plugins import StrictModel


class LoraSpec(StrictModel):
    """Train LoRA adapters (arXiv 2106.09685) instead of all weights."""

    rank: int = Field(default=16, gt=0, le=4096)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0.0, le=65536.0)
    """Adapters are scaled by `alpha / rank`."""
    target_modules: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        default=("all-linear",), min_length=1, max_length=256
    )
    """Names of the modules that get one, as in peft: `[q_proj, v_proj]`. `all-linear` alone: all
    linear layers but the head. Experts can have none: a model that has them needs names."""
    publish: Literal["adapter", "merged"] = "adapter"
    """`adapter`: only adapters change from version to version, and only they are sent; workers
    merge them. `merged`: the trainer merges them, and sends all weights that have one."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value
