"""Reaps orphaned processes, as the init process of a container must."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

PERIOD_S = 5.0


class Orphans:
    """Reaps zombie children of this process that nothing else waits for.

    Children that this process started are awaited promptly by their owners, so only those that
    were already zombies at the previous scan are reaped.
    """

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._seen: set[int] = set()

    def reap(self) -> list[int]:
        """Reap zombies that were seen before; returns their process ids."""
        zombies = set(self._zombies())
        reaped = [pid for pid in sorted(zombies & self._seen) if _reap(pid)]
        self._seen = zombies.difference(reaped)
        return reaped

    async def watch(self) -> None:
        """Reap until cancelled if this is process 1, which inherits all orphans."""
        while os.getpid() == 1:
            await asyncio.sleep(PERIOD_S)
            self.reap()

    def _zombies(self) -> Iterator[int]:
        for path in self._proc.glob("[0-9]*/stat"):
            try:
                # The process name before the last parenthesis may contain any character.
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state == "Z" and int(parent) == os.getpid():
                yield int(path.parent.name)


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False
