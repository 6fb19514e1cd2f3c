"""Finds secrets where they must not be: in logs, responses, command lines and environments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

Place = tuple[str, bytes]


def leaks(secrets: Mapping[str, bytes], places: Iterable[Place]) -> list[str]:
    """List `SECRET in PLACE` for each leak.

    Raises:
        ValueError: a secret is too short to search for.
    """
    for name, secret in secrets.items():
        if len(secret) < 8:
            raise ValueError(f"{name}: has {len(secret)} bytes; at least 8")
    return [
        f"{name} in {where}"
        for where, content in places
        for name, secret in secrets.items()
        if secret in content or secret.hex().encode() in content.lower()
    ]


def files(folder: Path) -> Iterator[Place]:
    """All logs below a folder, and all files that are readable by others than their owner."""
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # removed since: a temporary file, or that of a process
            if path.is_file() and (path.suffix == ".log" or path.stat().st_mode & 0o077):
                content = path.read_bytes()
                yield str(path.relative_to(folder)), content


def processes(roots: Iterable[int]) -> Iterator[Place]:
    """Command lines and environments of processes and all their descendants."""
    for root in roots:
        for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
            for what in ("cmdline", "environ"):
                path = Path(f"/proc/{process.pid}/{what}")
                try:
                    yield f"{what} of {process.pid}", path.read_bytes()
                except (FileNotFoundError, ProcessLookupError):
                    break
