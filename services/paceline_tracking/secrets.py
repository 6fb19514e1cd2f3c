"""Redacts secrets in the environment of trackers from messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_NAMED = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")
_LEAST_CHARS = 6
_USER = re.compile(r"://[^/@\s]+@")
# Also query parameters of signed URLs: X-Amz-Security-Token, X-Amz-Signature, ...
_QUERY = re.compile(r"(?i)([?&][\w.-]*(?:token|key|password|secret|signature|credential)=)[^&#\s]*")


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Remove values of variables with names of secrets, and credentials in URLs."""
    values = [
        value
        for name, value in environment.items()
        if _NAMED.search(name) and len(value) >= _LEAST_CHARS
    ]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return _QUERY.sub(r"\1***", _USER.sub("://***@", text))
