"""Describes a failure in one line, marked with OOM if memory ran out."""

from __future__ import annotations

import re
from pathlib import Path

OOM = "OOM"
KILLED = "ended by SIGKILL"
MAX_CHARS = 2000
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|out of memory|can't allocate memory|cannot allocate memory|"
    r"OOMKilled|ENOMEM",
    re.IGNORECASE,
)
_KILLS = Path("/proc/vmstat")


def describe(error: BaseException) -> str:
    """Type and message of an error, prefixed with `OOM: ` if a GPU or machine ran out of memory."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    text = f"{name}: {error}".rstrip(": ")
    return marked(text)[:MAX_CHARS]


def marked(text: str) -> str:
    """The text with the prefix `OOM: ` if it mentions that memory ran out."""
    if text.startswith(OOM) or not _NO_MEMORY.search(text):
        return text
    return f"{OOM}: {text}"


def num_oom_kills(path: Path = _KILLS) -> int:
    """Number of OOM kills by this machine's kernel so far; 0 if unknown."""
    try:
        rows = path.read_text().splitlines()
    except OSError:
        return 0
    counts = [row.split()[1] for row in rows if row.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0
