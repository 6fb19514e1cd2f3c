"""What all configuration models have in common."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
NAME = r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]


class _NoNumber:
    """Stands for a boolean where a number belongs: pydantic would take `true` for 1."""

    def __init__(self, value: bool) -> None:
        self._text = "true" if value else "false"

    def __repr__(self) -> str:
        return self._text


class Strict(BaseModel):
    """A model in which booleans are no numbers."""

    @model_validator(mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = cast(dict[Any, Any], value)
        fields = cls.model_fields
        return {
            name: _without_booleans(each)
            if name in fields and not _takes_booleans(fields[name].annotation)
            else each
            for name, each in given.items()
        }


def _without_booleans(value: Any) -> Any:
    if isinstance(value, bool):
        return _NoNumber(value)
    if isinstance(value, (list, tuple)):
        return [_without_booleans(each) for each in cast(list[Any], value)]
    return value


@cache
def _takes_booleans(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_booleans, get_args(annotation)))


class Closed(Strict):
    """An immutable model that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Plugin(Strict):
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
