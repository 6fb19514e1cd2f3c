"""Loads a job's objective and binds its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

from paceline.config.base import PluginSpec
from paceline.config.load import validate
from paceline.errors import ConfigError, InvalidError
from paceline.methods.parts.batch import Loss, Objective
from paceline.plugins import declared, registry


def load_objective(plugin: PluginSpec) -> Objective:
    """The objective, with its options validated and bound.

    Raises:
        InvalidError: there is no such plug-in, or it has no such option.
    """
    function: Callable[..., Loss] = registry.find("objectives", plugin.kind)
    name = f"trainer.objective {plugin.kind!r}"
    if not callable(function) or "options" not in inspect.signature(function).parameters:
        raise InvalidError(f"{name}: must be a function of (batch, options)")
    model: Any = get_type_hints(function)["options"]
    try:
        options = validate(model, plugin.options)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if needs := declared(model).needs_with(plugin.options):
        raise ConfigError(f"{name}: needs {', '.join(needs)}, which this trainer does not have")
    bound: Objective = partial(function, options=options)
    return bound
