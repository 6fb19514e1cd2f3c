"""Ports for servers that tests start, stop and restart."""

from __future__ import annotations

import fcntl
import os
import random
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from paceline.front.local.ports import is_free

PLAIN = False
"""As `verify` of a request without TLS: 50 ms of processor time less than to load certificates."""
# Below the ranges from which Paceline and the operating system choose.
_PORTS = range(10_000, 20_000)
_taken: set[int] = set()
_lock: list[int] = []


def free_port() -> int:
    """A free port, not given to any other test process while this one lives."""
    if not _lock:
        path = (
            Path("/tmp") / f"paceline-test-ports-{os.getuid()}"
        )  # one for all tests on the machine
        _lock.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for port in random.sample(_PORTS, len(_PORTS)):
        if port not in _taken and _take(port):
            _taken.add(port)
            return port
    raise AssertionError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _take(port: int) -> bool:
    try:  # locks one byte per port; the system releases them when this process ends
        fcntl.lockf(_lock[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return is_free(port)


@contextmanager
def held_port(host: str = "127.0.0.1") -> Generator[int]:
    """A port that the system does not hand out to others until the block ends.

    It is bound without listening: servers that set SO_REUSEADDR, as all ours do, can bind it, also
    repeatedly, while processes that ask for any free port get another one.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
