"""Texts of bounded size, and texts that are safe to show."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

# Control, format (direction, width, tags), surrogates, private use, line and paragraph separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
MAX_NAME = 128
"""Characters of a name that a plug-in makes up."""
_LOOKS_EMPTY = frozenset({0x115F, 0x1160, 0x2800, 0x3164, 0xFFA0})


def clipped(text: str, max_bytes: int) -> str:
    """The text, truncated with a note of its size to at most `max_bytes` of UTF-8.

    Characters that UTF-8 cannot encode (lone surrogates) are replaced. `max_bytes` is at least 64.
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    note = f" ... ({len(data)} bytes in all)"
    return data[: max_bytes - len(note)].decode("utf-8", "ignore") + note


def is_name(text: str, max_chars: int = MAX_NAME) -> bool:
    """Whether it can name a metric or a part of a reward: printable, not empty, not too long."""
    return 0 < len(text) <= max_chars and text.isprintable()


def encodable(text: str) -> str:
    """The text with `?` for each lone surrogate, which neither UTF-8 nor protobuf can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def human_bytes(count: int) -> str:
    """A size for display: `256 KiB`, `1.5 GiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{round(size, 1):g} {units[0]}"


def human_seconds(seconds: float) -> str:
    """A time for display, in its two largest units: `45 s`, `3 min 20 s`, `2 h 5 min`."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break  # nothing of the unit below the largest one
    return " ".join(parts[:2])


def visible(text: str) -> str:
    """The text with every character that could act on a terminal or reorder text made visible.

    Escape sequences, other control characters (except line ends and tabs), marks of direction and
    characters without width become symbols (`␛`) or their code in brackets (`⟨U+202E⟩`).
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or (0x20 <= code < 0x7F):
        return char
    if code <= 0x20 or code == 0x7F:
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    hidden = unicodedata.category(char) in _HIDDEN or code in _LOOKS_EMPTY
    return f"⟨U+{code:04X}⟩" if hidden else char


def as_text(value: Any) -> str:
    """A value of JSON as text: itself if it is one, else as JSON writes it, as in `true`."""
    return value if isinstance(value, str) else json.dumps(value)
