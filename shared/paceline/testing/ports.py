"""Ports for servers that tests start in processes of their own."""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
from pathlib import Path

from paceline.ports import is_free

# Below those that Paceline and the system choose themselves.
_PORTS = range(10_000, 20_000)
_taken: set[int] = set()
_lock: list[int] = []


def free_port() -> int:
    """Nobody listens there, and no other process of tests is given it while this one lives."""
    if not _lock:
        path = Path(tempfile.gettempdir()) / f"paceline-test-ports-{os.getuid()}"
        _lock.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for port in random.sample(_PORTS, len(_PORTS)):
        if port not in _taken and _take(port):
            _taken.add(port)
            return port
    raise AssertionError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _take(port: int) -> bool:
    try:  # a byte for each port; the system lets go of them when this process ends
        fcntl.lockf(_lock[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return is_free(port)
