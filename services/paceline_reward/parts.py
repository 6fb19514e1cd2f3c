"""A job's `reward:` section as parts that can be run: which function, where, with which options."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline import plugins
from paceline.config.job import RewardSpec
from paceline.config.load import explain
from paceline.errors import ConfigError, InvalidError

BUILTIN = "paceline_reward.builtin."
# Only what cannot hang whatever its options are runs in this process; a regular expression of
# the user's can backtrack for hours, so it goes to the children like user code.
INLINE = frozenset(
    {
        "paceline_reward.builtin.exact:exact",
        "paceline_reward.builtin.environment:environment",
    }
)
_SECTION: TypeAdapter[tuple[RewardSpec, ...]] = TypeAdapter(tuple[RewardSpec, ...])


@dataclass(frozen=True, slots=True)
class Part:
    """One part: `inline` is called in this process, else children call `target`."""

    name: str
    weight: float
    timeout_s: float
    target: str  # module:attribute
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    inline: Callable[..., Any] | None = None


def read_parts(rewards_json: str) -> tuple[Part, ...]:
    """The parts of a `reward:` section.

    Raises:
        InvalidError: it is not such a section, or names a reward that is not installed.
    """
    try:
        specs = _SECTION.validate_python(json.loads(rewards_json))
    except json.JSONDecodeError as error:
        raise InvalidError(f"rewards_json: not JSON: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"reward: {explain(error, BaseModel)}") from None
    if not specs:
        raise InvalidError("reward: at least one part is needed")
    return tuple(_part(spec) for spec in specs)


def _part(spec: RewardSpec) -> Part:
    plugins.check("rewards", spec.kind)
    options = spec.options
    target = spec.kind
    if ":" not in target:
        target = plugins.installed("rewards")[target].value
    if spec.kind == "python":
        # Resolved here so that a child imports it before the clock of a score starts.
        target = _function(options.pop("function", None), spec.part)
    function = plugins.find("rewards", target) if target.startswith(BUILTIN) else None
    if function is not None:
        _check_options(function, options, part=spec.part)
    return Part(
        name=spec.part,
        weight=spec.weight,
        timeout_s=spec.timeout_s,
        target=target,
        options=options,
        inline=function if target in INLINE else None,
    )


def _function(value: Any, part: str) -> str:
    if not isinstance(value, str) or not all(value.partition(":")):
        raise InvalidError(f"reward {part}: function: must be 'module:function' (got {value!r})")
    return value


def _check_options(function: Callable[..., Any], options: dict[str, Any], *, part: str) -> None:
    keywords = inspect.signature(function).parameters.values()
    known = {p.name: p for p in keywords if p.kind is p.KEYWORD_ONLY}
    for name in options:
        if name not in known:
            allowed = ", ".join(sorted(known)) or "none"
            raise InvalidError(f"reward {part}: unknown option {name!r}; allowed: {allowed}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise InvalidError(f"reward {part}: option {name!r} is missing")
