"""Keeps what trackers read from the environment out of messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_NAMED = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")
_LEAST_CHARS = 6


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text without the values of variables that are named like secrets."""
    values = [
        value
        for name, value in environment.items()
        if _NAMED.search(name) and len(value) >= _LEAST_CHARS
    ]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return re.sub(r"://[^/@\s]+@", "://***@", text)
