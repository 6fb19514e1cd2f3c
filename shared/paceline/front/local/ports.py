"""Ports on this machine by slot, chosen once and kept across restarts."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from paceline.errors import StateError
from paceline.platform.files import locked, read_json, write_json

USUAL_PORT = 8300
"""Port of the REST API, unless another one is asked for."""
# Below the ephemeral port range of operating systems.
PORTS = range(20_000, 32_000)
_LAST = 65_535


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

    def slots(self) -> list[str]:
        """All that have a port."""
        return list(read_json(self._path) or {})

    def known(self, slot: str) -> int | None:
        """The port chosen earlier, free or not; None if there is none."""
        slots: dict[str, int] = read_json(self._path) or {}
        return slots.get(slot)

    def _choose(self, taken: set[int]) -> int:
        return free_port(self._rng, taken=taken)


def free_port(
    rng: random.Random, *, derived: Iterable[int] = (), taken: Collection[int] = ()
) -> int:
    """A free port that is not `taken`, with those that its server derives from it.

    `derived`: their distances to it. They are free too, and none is one that the system would give
    to somebody else before the server binds it.

    Raises:
        StateError: there is none.
    """
    distances = (0, *derived)
    least, most = min(distances), max(distances)
    for port in rng.sample(PORTS, len(PORTS)):
        inside = port + least in PORTS and port + most in PORTS
        if inside and port not in taken and are_free(port, distances):
            return port
    together = f" together with those that it needs up to {most:+d}" if most else ""
    raise StateError(
        f"no port between {PORTS.start} and {PORTS.stop - 1} is free{together}; end processes "
        "that listen there"
    )


def are_free(port: int, derived: Iterable[int] = ()) -> bool:
    """Whether a server could bind this port and all at these distances to it."""
    return all(is_free(port + distance) for distance in (0, *derived))


def claim(port: int) -> socket.socket | None:
    """Keep other installations on this machine from this port until the claim is closed.

    Between a look at a port and a server that listens there, another installation that looks finds
    it free too. The claim is a name that the system releases with this process; None if somebody
    has it. Only Linux has such names.
    """
    holder = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            holder.bind(f"\0paceline-port-{port}")
        except OSError:
            holder.close()
            return None
    return holder


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind this port; there is none above 65,535."""
    if port > _LAST:
        return False
    with socket.socket() as probe:
        # Servers do the same, so that connections in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
