"""What the suites have in common."""

from __future__ import annotations

import json
import math
from typing import Any

from paceline.plugins import registry


def resolved(kind: str, plugin: Any) -> Any:
    """The plug-in of an installed name; anything else is the plug-in itself."""
    return registry.find(kind, plugin) if isinstance(plugin, str) else plugin


def expect(condition: object, message: str) -> None:
    """Raise `AssertionError`, also where Python runs without assertions."""
    if not condition:
        raise AssertionError(message)


def expect_type(value: object, kind: type, where: str) -> None:
    """Raise `AssertionError` unless a value is of a type."""
    expect(isinstance(value, kind), f"{where} is {value!r}; a {kind.__name__} is due")


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no boolean or array."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def through_json(value: Any) -> Any:
    """What the store gives back of a value; it must be all of it."""
    found = json.loads(json.dumps(value, allow_nan=False))
    expect(found == value, f"{value!r} comes back from JSON as {found!r}")
    return found
