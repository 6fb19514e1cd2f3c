"""Parses a job's `reward:` section into parts: function, process, options, weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.config.documents import read_json
from paceline.config.job import RewardSection, RewardSpec
from paceline.config.load import explain
from paceline.config.named import FUNCTION, named_function
from paceline.config.options import wrong_options
from paceline.errors import ConfigError, InvalidError
from paceline.plugins import declared, registry
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets

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
    is_own: bool = False  # `target` is in the code of the job


def read_parts(
    rewards_json: str, *, has_code: bool = False, allowed: AllowedTargets = NO_TARGETS
) -> tuple[RewardPart, ...]:
    """The parts of a `reward:` section.

    `has_code`: the job has code of its own, and functions that it names by module are in there;
    otherwise they must be `allowed`.

    Raises:
        InvalidError: the section is invalid, or names a reward that is not installed.
        UnlistedError: it names a function of a module that is not `allowed`.
    """
    try:
        specs = _SECTION.validate_python(read_json(rewards_json, what="rewards_json"))
    except ValidationError as error:
        raise ConfigError(f"reward: {explain(error, BaseModel)}") from None
    return tuple(
        _own_part(spec, f"reward.{index}", named[1])
        if has_code and (named := named_function(spec)) is not None
        else _part(spec, f"reward.{index}", allowed)
        for index, spec in enumerate(specs)
    )


def stages(parts: Sequence[RewardPart]) -> list[list[RewardPart]]:
    """Parts that can be scored together; each stage needs only those before it."""
    depths: dict[str, int] = {}
    for part in parts:
        depths[part.name] = 1 + max((depths[name] for name in part.after), default=-1)
    return [
        [part for part in parts if depths[part.name] == depth]
        for depth in sorted(set(depths.values()))
    ]


def _own_part(spec: RewardSpec, field: str, function: str) -> RewardPart:
    """A part whose function is in the code of the job, which says what options it has."""
    if spec.kind != function:
        _check_options(spec, field)
    return _made(spec, function, is_own=True)


def _part(spec: RewardSpec, field: str, allowed: AllowedTargets) -> RewardPart:
    registry.check("rewards", spec.kind, allowed=allowed)
    _check_options(spec, field)
    if (named := named_function(spec)) is not None:
        return _made(spec, registry.target("rewards", named[1], allowed=allowed))
    # Only installed rewards may run here: others must not be loaded into this process.
    told = declared(registry.options_of("rewards", spec.kind))
    made = _made(spec, registry.target("rewards", spec.kind))
    if told.inline:
        return replace(made, inline=registry.find("rewards", spec.kind))
    if told.programs or told.endpoints:
        judge = registry.find("rewards", spec.kind)
        return replace(made, judge=judge, given="endpoints" if told.endpoints else "programs")
    return made


def _check_options(spec: RewardSpec, field: str) -> None:
    if problems := list(wrong_options(field, "rewards", spec.kind, spec.options)):
        raise InvalidError("; ".join(problems))


def _made(spec: RewardSpec, target: str, *, is_own: bool = False) -> RewardPart:
    is_python = named_function(spec) is not None and spec.kind != target
    dropped = {FUNCTION} if is_python else set[str]()
    return RewardPart(
        name=spec.part,
        weight=spec.weight,
        timeout_s=spec.timeout_s,
        target=target,
        options={name: value for name, value in spec.options.items() if name not in dropped},
        after=spec.after,
        is_own=is_own,
    )
