"""Looks for secrets where they must not be: in logs, answers, command lines and environments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

Place = tuple[str, bytes]


def leaks(secrets: Mapping[str, bytes], places: Iterable[Place]) -> list[str]:
    """`SECRET in PLACE` for each one found.

    Raises:
        ValueError: a secret is so short that it would be found anywhere.
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
    """All files below a folder that others than their owner may read, and all logs."""
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # gone since: it was a draft, or of a process
            if path.is_file() and (path.suffix == ".log" or path.stat().st_mode & 0o077):
                content = path.read_bytes()
                yield str(path.relative_to(folder)), content


def processes(roots: Iterable[int]) -> Iterator[Place]:
    """Command lines and environments of processes and all that they have started."""
    for root in roots:
        for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
            for what in ("cmdline", "environ"):
                path = Path(f"/proc/{process.pid}/{what}")
                try:
                    yield f"{what} of {process.pid}", path.read_bytes()
                except (FileNotFoundError, ProcessLookupError):
                    break
