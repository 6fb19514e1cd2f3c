"""What a failure is called: one line, with the word OOM where memory was the reason."""

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
    """Type and message of an error; `OOM: ` before it if memory ran out, on a GPU or a machine."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    text = f"{name}: {error}".rstrip(": ")
    return marked(text)[:MAX_CHARS]


def marked(text: str) -> str:
    """`OOM: ` before a text that tells of memory that ran out, once."""
    if text.startswith(OOM) or not _NO_MEMORY.search(text):
        return text
    return f"{OOM}: {text}"


def num_oom_kills(path: Path = _KILLS) -> int:
    """How many processes this machine's kernel has killed for memory; 0: it does not say."""
    try:
        rows = path.read_text().splitlines()
    except OSError:
        return 0
    counts = [row.split()[1] for row in rows if row.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0
