"""Imports `module:attribute`."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import InvalidError
from paceline.errors.extras import not_installed


def attribute(target: str) -> Any:
    """Import the object that `module:attribute` names.

    Raises:
        InvalidError: it is not of this form, there is no such module, or it has no such attribute.
    """
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise InvalidError(f"cannot import {target!r}: it is not module:attribute")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise InvalidError(f"cannot import {target!r}: {not_installed(error)}") from None
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidError(f"cannot import {target!r}: {error}") from None
