"""Types shared by all configuration models."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from paceline.plugins.model import JsonModel

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=365 * 86400)]
NAME = r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
KIND_CHARS = 253
MAX_OPTIONS_BYTES = 1 << 16
MAX_OPTIONS_DEPTH = 16


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a plug-in if their nesting and JSON size are within bounds.

    Raises:
        ValueError: they exceed a bound or are not JSON.
    """
    if (depth := _depth(options)) > MAX_OPTIONS_DEPTH:
        raise ValueError(
            f"options are {depth} levels deep; at most {MAX_OPTIONS_DEPTH} are allowed"
        )
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
    while level := [each for each in level if isinstance(each, (dict, list, tuple))]:
        depth += 1
        if depth > 2 * MAX_OPTIONS_DEPTH:
            break
        level = [inner for each in level for inner in _inside(each)]
    return depth


def _inside(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


Options = Annotated[dict[str, Any], Field(max_length=256), AfterValidator(check_options)]


class PluginSpec(JsonModel):
    """A plug-in by name (`kind`) and its own options.

    The name is that of an entry point; rewards and slots of the objective may
    also be `module:attribute`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    kind: str = Field(max_length=KIND_CHARS)

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
