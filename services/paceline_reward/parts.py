"""Parses a job's `reward:` section into parts: function, process, options, weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.code.modules import own_function
from paceline.config.documents import read_json
from paceline.config.job import RewardSection, RewardSpec
from paceline.config.load import explain
from paceline.config.options import wrong_options
from paceline.errors import ConfigError, InvalidError
from paceline.plugins import declared, registry

_SECTION: TypeAdapter[tuple[RewardSpec, ...]] = TypeAdapter(RewardSection)


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One part: this process calls `inline` or `judge`, otherwise children call `target`."""

    name: str
    weight: float
    timeout_s: float
    target: str  # module:attribute
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    inline: Callable[..., Any] | None = None
    judge: Callable[..., Any] | None = None  # a coroutine function
    given: Literal["programs", "endpoints"] = "programs"  # keyword of `judge`, what it works with
    after: tuple[str, ...] = ()  # parts before it whose rewards it is given
    is_own: bool = False  # the job names the function by its module


def read_parts(rewards_json: str) -> tuple[RewardPart, ...]:
    """The parts of a `reward:` section.

    Raises:
        InvalidError: the section is invalid, or names a reward that is not installed.
    """
    try:
        specs = _SECTION.validate_python(read_json(rewards_json, what="rewards_json"))
    except ValidationError as error:
        raise ConfigError(f"reward: {explain(error, BaseModel)}") from None
    return tuple(_part(spec, f"reward.{index}") for index, spec in enumerate(specs))


def stages(parts: Sequence[RewardPart]) -> list[list[RewardPart]]:
    """Parts that can be scored together; each stage needs only those before it."""
    depths: dict[str, int] = {}
    for part in parts:
        depths[part.name] = 1 + max((depths[name] for name in part.after), default=-1)
    return [
        [part for part in parts if depths[part.name] == depth]
        for depth in sorted(set(depths.values()))
    ]


def _part(spec: RewardSpec, field: str) -> RewardPart:
    registry.check("rewards", spec.kind)
    if problems := list(wrong_options(field, "rewards", spec.kind, spec.options)):
        raise InvalidError("; ".join(problems))
    is_installed = ":" not in spec.kind
    # Only installed rewards may run here: a job must not load its own code into this process.
    told = declared(registry.options_of("rewards", spec.kind) if is_installed else None)
    return RewardPart(
        name=spec.part,
        weight=spec.weight,
        timeout_s=spec.timeout_s,
        target=registry.installed("rewards")[spec.kind].value if is_installed else spec.kind,
        options=spec.options,
        after=spec.after,
        inline=registry.find("rewards", spec.kind) if told.inline else None,
        is_own=own_function(spec) is not None,
        judge=registry.find("rewards", spec.kind) if told.programs or told.endpoints else None,
        given="endpoints" if told.endpoints else "programs",
    )
