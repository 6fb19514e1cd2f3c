"""What the first process of a container owes to orphans: to note that they have ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

PERIOD_S = 5.0


class Orphans:
    """Dead children of this process that nobody here waits for.

    Those that this process started itself are waited for at once by who started them, so only
    what was dead at the look before is noted.
    """

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._seen: set[int] = set()

    def reap(self) -> list[int]:
        """Note the ends of those that were dead before too; their process ids."""
        dead = set(self._dead())
        reaped = [pid for pid in sorted(dead & self._seen) if _note(pid)]
        self._seen = dead.difference(reaped)
        return reaped

    async def watch(self) -> None:
        """Reap for ever; needed only by process 1, which inherits all orphans."""
        while os.getpid() == 1:
            await asyncio.sleep(PERIOD_S)
            self.reap()

    def _dead(self) -> Iterator[int]:
        for path in self._proc.glob("[0-9]*/stat"):
            try:
                # The name before the last parenthesis may hold anything.
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state == "Z" and int(parent) == os.getpid():
                yield int(path.parent.name)


def _note(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False
