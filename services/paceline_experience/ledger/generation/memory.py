"""What the plug-ins of a job remember across steps. It changes only when a batch is fixed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

KEY_BYTES = 256
VALUE_BYTES = 4 << 10
TOTAL_BYTES = 64 << 20
_SEPARATOR = "/"


class Memory:
    """JSON texts by `plug-in/key`; values are parsed when they are read."""

    def __init__(self, texts: Mapping[bytes, bytes] | None = None) -> None:
        self._texts = {key.decode(): text.decode() for key, text in (texts or {}).items()}
        self._bytes = sum(len(key) + len(text) for key, text in (texts or {}).items())

    def of(self, plugin: str) -> Mapping[str, Any]:
        """The values of one plug-in by key; read-only."""
        return _Values(self._texts, plugin + _SEPARATOR)

    def texts(self, plugin: str) -> dict[str, str]:
        """The JSON texts of one plug-in's values by key."""
        start = plugin + _SEPARATOR
        found = self._texts.items()
        return {name[len(start) :]: text for name, text in found if name.startswith(start)}

    def apply(self, texts: Mapping[str, str]) -> None:
        """Take over what `changed` has returned, once it is written."""
        for name, text in texts.items():
            before = self._texts.pop(name, None)
            self._bytes -= 0 if before is None else len(name.encode()) + len(before)
            if text:
                self._texts[name] = text
                self._bytes += len(name.encode()) + len(text)

    def changed(self, plugin: str, values: Mapping[str, Any]) -> dict[str, str]:
        """Texts of new values by `plug-in/key`; an empty one deletes the key.

        Raises:
            TypeError: a value is not JSON.
            ValueError: a key, a value or the whole memory is too large, or a number not finite.
        """
        found: dict[str, str] = {}
        total = self._bytes
        for key, value in values.items():
            if not 0 < len(key.encode()) <= KEY_BYTES:
                raise ValueError(f"a key of the memory has 1 to {KEY_BYTES} bytes, not {key!r}")
            text = "" if value is None else json.dumps(value, allow_nan=False)
            if len(text) > VALUE_BYTES:
                raise ValueError(
                    f"memory {key!r} has {len(text)} bytes; at most {VALUE_BYTES} are allowed"
                )
            name = plugin + _SEPARATOR + key
            before = self._texts.get(name)
            total += len(text) + len(name.encode()) if text else 0
            total -= len(before) + len(name.encode()) if before is not None else 0
            found[name] = text
        if total > TOTAL_BYTES:
            raise ValueError(f"the memory has {total} bytes; at most {TOTAL_BYTES} are allowed")
        return found


class _Values(Mapping[str, Any]):
    def __init__(self, texts: Mapping[str, str], prefix: str) -> None:
        self._texts = texts
        self._prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return json.loads(self._texts[self._prefix + key])

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return (name[start:] for name in self._texts if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
