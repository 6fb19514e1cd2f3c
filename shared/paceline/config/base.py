"""What all configuration models have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
NAME = r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]


class Closed(BaseModel):
    """An immutable model that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Plugin(BaseModel):
    """A plug-in by name (`kind`) and its own options.

    The name is that of an entry point; rewards and objectives may also be `module:attribute`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    kind: str

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside `kind` and the declared fields."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value
