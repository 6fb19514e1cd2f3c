"""The embedded store of a run, restarted when it dies, with a clock that can jump."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from paceline.front.local.processes import Processes, Record
from paceline.front.local.store import NAME, EmbeddedStore

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
_LOOK_S = 0.1
_REMEMBERED_S = 5.0


class _Preloaded(Processes):
    """Processes whose clock offset is read from a file."""

    def __init__(self, *, clock: Path, **more: Any) -> None:
        super().__init__(**more)
        self._clock = clock

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        mark: str,
        labels: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        forked: bool = False,
    ) -> Record:
        """Start a process, with libfaketime if it is installed, and so never as a fork."""
        more = {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._clock),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        environment = {**(environment or {}), **(more if FAKETIME.exists() else {})}
        return super().start(name, command, mark=mark, labels=labels, environment=environment)


class Store:
    """Restarts the embedded store when it dies, as a supervisor would."""

    def __init__(self, run_dir: Path, notes: Path) -> None:
        self._clock = notes / "store.clock"
        self._clock.write_text("+0\n")
        self._folder = run_dir / "store"
        self._processes = _Preloaded(
            clock=self._clock,
            folder=run_dir / "processes",
            logs=run_dir / "logs",
            owner="store",
        )
        self._embedded = EmbeddedStore(run_dir, processes=self._processes)
        self._held = threading.Lock()
        self._stopping = threading.Event()
        self._sizes: deque[tuple[float, dict[Path, int]]] = deque()
        self._guard = threading.Thread(target=self._watch, name="store", daemon=True)

    @property
    def url(self) -> str:
        """Address of the store."""
        return self._embedded.url

    @property
    def pid(self) -> int:
        """Its process id; 0 if it does not run."""
        record = self._processes.find(NAME)
        return record.pid if record is not None else 0

    def start(self) -> None:
        """Start the store and its watchdog."""
        self._embedded.start()
        self._guard.start()

    def stop(self) -> None:
        """Stop both."""
        self._stopping.set()
        self._guard.join()
        self._embedded.stop()

    def set(self, **values: str | int) -> None:
        """Set configuration values with CONFIG SET."""
        with redis.Redis.from_url(self.url, socket_timeout=10.0) as client:
            for name, value in values.items():
                client.config_set(name.replace("_", "-"), value)

    def used_bytes(self) -> int:
        """Bytes of memory in use."""
        with redis.Redis.from_url(self.url, socket_timeout=10.0) as client:
            info: Any = client.info("memory")
            return int(info["used_memory"])

    def shift_clock(self, seconds: float) -> None:
        """Set the offset of its wall clock from that of the machine."""
        self._clock.write_text(f"{seconds:+.0f}\n")

    @contextmanager
    def held(self) -> Generator[None]:
        """Prevent restarts until the block ends."""
        with self._held:
            yield

    def cut(self, *, lost_s: float) -> int:
        """Truncate the last `lost_s` seconds of the append-only file; returns the bytes removed.

        Only while the store is dead, within `held`.
        """
        with_times = [sizes for at, sizes in self._sizes if at <= time.monotonic() - lost_s]
        before, lost = with_times[-1] if with_times else {}, 0
        for path, size in self._files().items():
            kept = before.get(path, size)  # newer files are not truncated
            if kept < size:
                os.truncate(path, kept)
                lost += size - kept
        return lost

    def _files(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self._folder.rglob("*.incr.aof")}

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            now = time.monotonic()
            try:
                self._sizes.append((now, self._files()))
                while self._sizes[0][0] < now - _REMEMBERED_S:
                    self._sizes.popleft()
                if not self._held.acquire(blocking=False):
                    continue
                try:
                    if not self._processes.alive(NAME) and not self._embedded.answers():
                        self._embedded.launch()
                finally:
                    self._held.release()
            except OSError:  # the disk is full, or a file vanished
                continue
