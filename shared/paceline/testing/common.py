"""Helpers shared by the contract tests."""

from __future__ import annotations

import json
import math
from typing import Any

from paceline.plugins import registry
from paceline.plugins.allowed import AllowedTargets


def resolved(kind: str, plugin: Any) -> Any:
    """Load a plug-in by its name, as if an operator had listed it; anything else is returned."""
    if not isinstance(plugin, str):
        return plugin
    return registry.find(kind, plugin, allowed=AllowedTargets.of([plugin]))


def expect(condition: object, message: str) -> None:
    """Raise `AssertionError` unless the condition holds, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def expect_type(value: object, kind: type, where: str) -> None:
    """Raise `AssertionError` unless a value has this type."""
    expect(isinstance(value, kind), f"{where} is {value!r}; expected {kind.__name__}")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; booleans and arrays are not."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def through_json(value: Any) -> Any:
    """The value after a round trip through JSON, as in the store; it must be unchanged."""
    found = json.loads(json.dumps(value, allow_nan=False))
    expect(found == value, f"{value!r} becomes {found!r} after a round trip through JSON")
    return found
