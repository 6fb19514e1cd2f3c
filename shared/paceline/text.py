"""Texts of bounded size."""

from __future__ import annotations


def clipped(text: str, max_bytes: int) -> str:
    """The text, truncated with a note of its size to at most `max_bytes` of UTF-8.

    Characters that UTF-8 cannot encode (lone surrogates) are replaced. `max_bytes` is at least 64.
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    note = f" ... ({len(data)} bytes in all)"
    return data[: max_bytes - len(note)].decode("utf-8", "ignore") + note


def human_bytes(count: int) -> str:
    """A size for display: `256 KiB`, `1.5 GiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{round(size, 1):g} {units[0]}"
