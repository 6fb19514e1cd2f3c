"""Journals that plug-ins of a job write: JSON lines, one file per process.

They bypass Paceline, so its records can be checked against them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


class Journal:
    """Appends events as whole lines, so that a killed process leaves no partial line."""

    def __init__(self, folder: Path, role: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{role}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._head = {"pid": os.getpid(), "role": role}

    def note(self, event: str, **fields: Any) -> None:
        """Append an event with its wall-clock time."""
        line = {"event": event, "at": time.time(), **self._head, **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())


@cache
def journal(folder: str, role: str) -> Journal:
    """The journal of this process."""
    return Journal(Path(folder), role)


class Reader:
    """Reads what was appended to the journals of a folder since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def news(self) -> list[dict[str, Any]]:
        """New events of all processes, by time."""
        found: list[dict[str, Any]] = []
        for path in self._folder.glob("*.jsonl"):
            found.extend(self._of(path))
        return sorted(found, key=lambda event: event["at"])

    def _of(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read[path] = self._read.get(path, 0) + len(line)
                yield json.loads(line)
