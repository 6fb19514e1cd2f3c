"""What all configuration models have in common."""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any, Self, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=365 * 86400)]
NAME = r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
KIND_CHARS = 253
MAX_OPTIONS_BYTES = 1 << 16
MAX_OPTIONS_DEPTH = 16


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a plug-in, if they are bounded in nesting and in bytes of JSON.

    Raises:
        ValueError: they are not, or hold what JSON cannot.
    """
    if (depth := _depth(options)) > MAX_OPTIONS_DEPTH:
        raise ValueError(f"options are {depth} levels deep; at most {MAX_OPTIONS_DEPTH} may be")
    try:
        num_bytes = len(json.dumps(options, allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"options: {error}") from None
    if num_bytes > MAX_OPTIONS_BYTES:
        raise ValueError(f"options have {num_bytes} bytes; at most {MAX_OPTIONS_BYTES} may be")
    return options


def _depth(value: Any) -> int:
    """Levels of mappings and lists, counted without recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, (dict, list, tuple))]:
        depth += 1
        if depth > 2 * MAX_OPTIONS_DEPTH:
            break
        level = [inner for each in level for inner in _inside(each)]
    return depth


def _inside(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


Options = Annotated[dict[str, Any], Field(max_length=256), AfterValidator(check_options)]


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

    kind: str = Field(max_length=KIND_CHARS)

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside `kind` and the declared fields."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _options_are_bounded(self) -> Self:
        check_options(self.options)
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value
