"""Ports for servers that tests start, and end, and start again."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from paceline.local.ports import is_free

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


@contextmanager
def held_port(host: str = "127.0.0.1") -> Generator[int]:
    """A port that the system gives to nobody else until the block ends.

    It is bound, and nobody listens: a server that sets SO_REUSEADDR, as they all do, can take it
    and take it again after its end, while who asks for any port is given another.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
