"""Base classes of options and configuration models."""

from __future__ import annotations

from functools import cache
from typing import Any, cast, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class _NoNumber:
    """Replaces a boolean where a number is expected, since pydantic would accept `true` as 1."""

    def __init__(self, value: bool) -> None:
        self._text = "true" if value else "false"

    def __repr__(self) -> str:
        return self._text


class JsonModel(BaseModel):
    """A model that does not accept booleans as numbers."""

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


class StrictModel(JsonModel):
    """An immutable model that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
