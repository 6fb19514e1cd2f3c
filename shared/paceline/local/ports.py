"""Ports on this machine by slot, chosen once and kept across restarts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from paceline.errors import StateError
from paceline.files import locked, read_json, write_json

USUAL_PORT = 8300
"""Of the REST API, unless another one is asked for."""
# Below the ephemeral port range of operating systems.
PORTS = range(20_000, 32_000)


class PortSlots:
    """Ports by slot, chosen once and kept in a file that several processes share."""

    def __init__(self, path: Path, *, rng: random.Random | None = None) -> None:
        self._path = path
        self._rng = rng or random.Random()

    def take(self, slot: str) -> int:
        """The port of a slot; a new one only if another process currently holds it."""
        with locked(self._path.with_suffix(".lock")):
            slots: dict[str, int] = read_json(self._path) or {}
            if slot in slots and is_free(slots[slot]):
                return slots[slot]
            slots[slot] = self._choose(set(slots.values()))
            write_json(self._path, slots)
            return slots[slot]

    def release(self, *slots: str) -> None:
        """Forget the ports of slots that nobody takes again."""
        if not self._path.exists():
            return
        with locked(self._path.with_suffix(".lock")):
            known: dict[str, int] = read_json(self._path) or {}
            write_json(self._path, {k: port for k, port in known.items() if k not in slots})

    def known(self, slot: str) -> int | None:
        """The port chosen earlier, free or not; None if there is none."""
        slots: dict[str, int] = read_json(self._path) or {}
        return slots.get(slot)

    def _choose(self, taken: set[int]) -> int:
        for port in self._rng.sample(PORTS, len(PORTS)):
            if port not in taken and is_free(port):
                return port
        raise StateError(f"no free port between {PORTS.start} and {PORTS.stop}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind this port."""
    with socket.socket() as probe:
        # As servers do, so that connections in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
