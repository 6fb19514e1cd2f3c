"""Locks on files among the workers of a machine; each is gone with its holder.

A lock file may be removed by whoever holds it: whoever has waited for it meanwhile finds that the
path has another file by now, or none, and tries again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_LOCKED_S = 0.1


@asynccontextmanager
async def locked(path: Path, *, keep: bool = False) -> AsyncGenerator[None]:
    """Hold the lock of a file, which is made for it, and removed afterwards unless `keep`."""
    while (fd := try_lock(path, create=True)) is None:
        await asyncio.sleep(_LOCKED_S)
    try:
        yield
    finally:
        if not keep:
            path.unlink(missing_ok=True)
        unlock(fd)


def try_lock(path: Path, *, shared: bool = False, create: bool = False) -> int | None:
    """A descriptor that holds the lock of the file at this path; None if somebody else holds it.

    Raises:
        FileNotFoundError: there is no such file, and it is not to be created.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if _is_at(fd, path):
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def unlock(fd: int) -> None:
    """Give a lock back."""
    fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked just now has the descriptor too
    os.close(fd)


def remove_unused(path: Path) -> bool:
    """Remove a file that nobody has locked; whether it is gone."""
    with suppress(FileNotFoundError):
        fd = try_lock(path)
        if fd is None:
            return False
        path.unlink()
        unlock(fd)
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether the path still leads to the file that has been opened."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino)
