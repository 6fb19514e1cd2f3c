"""A slot: a plug-in of an objective with its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from torch import Tensor

from paceline.config.base import PluginSpec
from paceline.config.load import validate
from paceline.errors import ConfigError, InvalidError
from paceline.methods.parts.slots import LogitRows, OfLogits, Planned, logits_of, plan_of
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.plugins import declared, registry
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets


@dataclass(frozen=True, slots=True)
class Slot:
    """A function with its options."""

    name: str  # unique in the objective; metrics are named after it
    function: Callable[..., Any]
    options: Any
    needs: frozenset[str]  # what the trainer has to compute for it

    @property
    def planned(self) -> Planned | None:
        """Its plan, if it has one."""
        return plan_of(self.function)

    @property
    def of_logits(self) -> OfLogits | None:
        """Its function of logits, if it has one."""
        return logits_of(self.function)

    def on_logits(self, rows: LogitRows) -> Tensor:
        """Result of its function of logits, [n]."""
        assert self.of_logits is not None
        return self.of_logits(rows, self.options)

    def plan(self, whole: WholeBatch) -> tuple[Any, ...]:
        """Extra arguments of its function: the result of its plan, or nothing."""
        planned = self.planned
        return () if planned is None else (planned.plan(whole, self.options),)

    def __call__(self, *args: Any) -> Any:
        """Call it with tokens, or losses and tokens, and its plan."""
        return self.function(*args, options=self.options)


def find_slot(
    kind: str,
    field: str,
    plugin: PluginSpec,
    *,
    name: str = "",
    allowed: AllowedTargets = NO_TARGETS,
) -> Slot:
    """The slot that a field of a job names.

    Raises:
        InvalidError: there is no such plug-in, or it has no such option.
        UnlistedError: it is a function of a module that is not `allowed`.
    """
    function = registry.find(kind, plugin.kind, allowed=allowed)
    where = f"{field} {plugin.kind!r}"
    return bind(function, plugin.options, where=where, name=name or plugin.kind)


def bind(function: Any, options: Mapping[str, Any], *, where: str, name: str) -> Slot:
    """A slot from its function.

    Raises:
        InvalidError: it is no function with a parameter `options` that names a model, or the model
            refuses the options.
    """
    if not callable(function) or "options" not in inspect.signature(function).parameters:
        raise InvalidError(f"{where}: must be a function with a parameter `options`")
    model: Any = get_type_hints(function)["options"]
    try:
        parsed = validate(model, dict(options))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Slot(name, function, parsed, frozenset(declared(model).needs_with(options)))
