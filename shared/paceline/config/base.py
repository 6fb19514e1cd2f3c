"""Types shared by all configuration models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Self, cast

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from paceline.plugins.model import JsonModel

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=365 * 86400)]
NAME = r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
KIND_CHARS = 253
Place = tuple[int | str, ...]  # keys and indices on the way to a value
MAX_OPTIONS_BYTES = 1 << 16
MAX_OPTIONS_DEPTH = 16


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a plug-in if their nesting and JSON size are within bounds.

    Raises:
        ValueError: they exceed a bound or are not JSON; names the option if a number is not finite.
    """
    if (depth := _depth(options)) > MAX_OPTIONS_DEPTH:
        raise ValueError(
            f"options are {depth} levels deep; at most {MAX_OPTIONS_DEPTH} are allowed"
        )
    odd = [
        InitErrorDetails(type="finite_number", loc=place, input=value)
        for place, value in _numbers(options)
        if not math.isfinite(value)
    ]
    if odd:
        raise ValidationError.from_exception_data("options", odd)
    try:
        num_bytes = len(json.dumps(options, allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"options: {error}") from None
    if num_bytes > MAX_OPTIONS_BYTES:
        raise ValueError(f"options have {num_bytes} bytes; at most {MAX_OPTIONS_BYTES} are allowed")
    return options


def _depth(value: Any) -> int:
    """Levels of mappings and lists, counted without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list, tuple))]:
        depth += 1
        if depth > 2 * MAX_OPTIONS_DEPTH:
            break
        level = [inner for container in level for inner in _inside(container)]
    return depth


def _numbers(value: Any, place: Place = ()) -> Iterator[tuple[Place, float]]:
    """Every float in mappings and lists, with its place; their depth is bounded."""
    if isinstance(value, float):
        yield place, value
    elif isinstance(value, dict):
        for key, item in cast(dict[Any, Any], value).items():
            yield from _numbers(item, (*place, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _numbers(item, (*place, index))


def _inside(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


Options = Annotated[dict[str, Any], Field(max_length=256), AfterValidator(check_options)]


class PluginSpec(JsonModel):
    """A plug-in by name (`kind`) and its own options.

    The name is that of an installed plug-in. Rewards, filters and advantages in the code that comes
    with the job are `module:attribute`; without such code, rewards and slots of the objective may
    be.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    kind: str = Field(max_length=KIND_CHARS)
    """Name of the plug-in."""

    @property
    def options(self) -> dict[str, Any]:
        """All fields other than `kind` and the declared ones."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _options_are_bounded(self) -> Self:
        check_options(self.options)
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value
