"""A complete local installation with a relay in front of experience and a separate disk."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from chaos.relay import Relay
from chaos.store import Store

from paceline.config.service import LogSettings
from paceline.enums import WorkerKind
from paceline.front.client.client import Client
from paceline.front.local.ports import PortSlots
from paceline.front.local.processes import Record, records_in
from paceline.front.local.supervisor import HOST, Local
from paceline.platform.telemetry import logs

HERE = Path(__file__).resolve().parent.parent
DISK_BYTES = 1 << 29
PAGE_BYTES = 4096
ENTRY_POINTS = """\
[paceline.environments]
chaos = chaos.world:ENVIRONMENT
[paceline.rewards]
chaos = chaos.world:reward
[paceline.engines]
moody = chaos.engine:Moody
deceiving = chaos.engine:Deceiving
[paceline.options.engines]
moody = chaos.engine:MoodyOptions
deceiving = chaos.engine:DeceivingOptions
[paceline.hooks]
chaos = chaos.objective:recorded
[paceline.options.hooks]
chaos = chaos.objective:RecordedOptions
"""


class Site:
    """An installation with so many workers of each kind; `close` stops it and keeps its files."""

    def __init__(self, workers: int) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="paceline-faults-"))
        self.notes, self.run_dir = self.base / "notes", self.base / "run"
        self.notes.mkdir()
        self.run_dir.mkdir()
        self.has_disk = _mount(self.run_dir)
        _install_plugins(self.base / "plugins")
        logging.raiseExceptions = False  # a full disk would flood the terminal
        logs.setup(LogSettings(path=self.base / "supervisor.log"))
        self.store = Store(self.run_dir, self.notes)
        self.store.start()
        ports = PortSlots(self.run_dir / "ports.json")
        self.relay = Relay(lambda: ports.known("experience"))
        self.local = Local(
            self.run_dir,
            http_port=0,
            store_url=self.store.url,
            options={
                WorkerKind.CONTROLLER: {
                    "environment_replicas": workers,
                    "reward_replicas": workers,
                    "max_restart_backoff_s": 2.0,
                }
            },
            experience_proxy=f"{HOST}:{self.relay.port}",
        )
        self.local.start(timeout_s=180.0)
        self.client = self.new_client()

    def new_client(self) -> Client:
        """A client of the gateway."""
        return Client(self.local.url, token=self.local.token, timeout_s=20.0)

    def pid_of(self, name: str) -> int:
        """Pid of a process by a prefix of its name; 0 if it does not run."""
        started = (each for each in self._records() if each.name.startswith(name))
        return next((each.pid for each in started if each.pid and psutil.pid_exists(each.pid)), 0)

    def names(self, beginning: str) -> list[str]:
        """Names of started processes with a prefix."""
        return [each.name for each in self._records() if each.name.startswith(beginning)]

    def fill_disk(self) -> Path:
        """Fill the remaining space; returns the file that occupies it."""
        path = self.run_dir / "ballast"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        piece = DISK_BYTES
        while piece >= PAGE_BYTES:
            try:
                os.posix_fallocate(file, os.fstat(file).st_size, piece)
            except OSError:
                piece //= 2
        os.close(file)
        return path

    def close(self) -> None:
        """Stop everything."""
        self.client.close()
        self.relay.release()
        self.relay.slow(0.0)
        with suppress(Exception):
            self.local.stop()
        self.relay.close()
        self.store.stop()

    def keep(self, job_id: str) -> Path:
        """Copy the logs and files of a job to a folder that is kept; returns it."""
        kept = self.base / f"kept-{job_id}"
        for name in ("logs", f"jobs/{job_id}"):
            shutil.copytree(self.run_dir / name, kept / name, dirs_exist_ok=True)
        return kept

    def remove(self, *, all_of_it: bool) -> None:
        """Unmount the run directory if it is a separate file system; optionally delete the rest."""
        if self.has_disk:
            subprocess.run(["umount", "-l", str(self.run_dir)], check=False)
        if all_of_it:
            shutil.rmtree(self.base, ignore_errors=True)

    def _records(self) -> Iterator[Record]:
        return records_in(self.run_dir / "processes")


def make_model(folder: Path) -> Path:
    """Create the model that all jobs use."""
    if not (folder / "config.json").exists():
        program = HERE / "chaos" / "model.py"
        subprocess.run([sys.executable, str(program), str(folder)], check=True)
    return folder


def wait_for(condition: Any, timeout_s: float, *, every_s: float = 0.1) -> bool:
    """Whether a condition became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def _mount(folder: Path) -> bool:
    """Mount a small file system that can be filled; needs root."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def _install_plugins(folder: Path) -> None:
    """Create what `pip install` of a distribution with these entry points would create."""
    info = folder / "paceline_chaos-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-chaos\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(HERE), *known])
