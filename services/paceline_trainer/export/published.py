"""What of a job file may be read by all who get the model."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, cast

from paceline.config.tracking import is_secret
from paceline.platform.store_url import without_secrets

_PRIVATE = ("notify",)  # whoever has the address of a webhook can often call it
_FILE = "file://"
_PATH = re.compile(r"[/~][^\s/]*(/[^\s/]+)+/?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")


def published(spec: dict[str, Any]) -> dict[str, Any]:
    """A job file without its webhook, what looks like a secret, and where folders are.

    Of an absolute path its name stays, as `.../name`; of a URL neither user nor query.
    """
    return {key: _value(key, each) for key, each in spec.items() if key not in _PRIVATE}


def place(text: str) -> str:
    """A path or URL as it may be published."""
    path = text.removeprefix(_FILE)
    if _PATH.fullmatch(path):
        return f".../{PurePosixPath(path).name}"
    return without_secrets(text) if _URL.fullmatch(text) else text


def _value(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        inner = cast(dict[str, Any], value)
        return {name: _value(name, each) for name, each in inner.items()}
    if isinstance(value, list):
        return [_value(key, each) for each in cast(list[Any], value)]
    if not isinstance(value, str) or not value:
        return value
    return "(removed)" if is_secret(key, value) else place(value)
