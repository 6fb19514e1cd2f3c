"""Ports of a test's own, over the ends and starts of its servers."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager


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
