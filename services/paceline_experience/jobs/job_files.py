"""What a job has left on disks and in object stores, apart from the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import UnavailableError
from paceline.front.local.ports import PortSlots
from paceline.platform.files import discard, discard_drafts
from paceline.platform.object_stores import filesystem_of
from paceline.platform.telemetry.monitoring import targets_of
from paceline_experience.jobs.forks.checkpoint_copies import (
    CheckpointCopy,
    copy_folder,
    copy_stored,
)


class JobFiles:
    """Finds and removes the files of jobs; `storage` is that of checkpoints, if not `run_dir`."""

    def __init__(self, run_dir: Path, *, storage: str = "") -> None:
        self._run_dir = run_dir
        self._storage = storage.rstrip("/")

    def remove(self, job_id: str) -> None:
        """Remove everything; may be repeated.

        Raises:
            UnavailableError: something cannot be removed, for now or without a person's help.
        """
        try:
            self._remove_processes(job_id)
            for path in self._paths(job_id):
                _remove(path)
            if self._storage:
                self._remove_stored(job_id)
        except OSError as error:
            raise UnavailableError(f"files of {job_id} cannot be removed: {error}") from error

    def copy_checkpoint(
        self, job_id: str, fork: CheckpointCopy, *, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Copy a checkpoint of a job to another one; its trainer verifies the content of each file.

        `stopped` is asked before each file.

        Raises:
            NotFoundError: there is none with this digest, or not any more.
            UnavailableError: it cannot be copied.
        """
        if not self._storage:
            copy_folder(self._run_dir / "jobs", job_id, fork, stopped)
            return
        fs, root = self._opened()
        if "file" in fs.protocol:
            copy_folder(Path(root), job_id, fork, stopped)
            return
        try:
            copy_stored(fs, root, job_id, fork, stopped)
        except OSError as error:
            raise UnavailableError(f"storage: {self._storage!r}: {error}") from error

    def _paths(self, job_id: str) -> Iterator[Path]:
        yield self._run_dir / "jobs" / job_id
        yield self._run_dir / "watermarks" / f"{job_id}.json"
        yield from (self._run_dir / "workers").glob(f"*/{job_id}")

    def _remove_processes(self, job_id: str) -> None:
        """Settings, logs and ports of processes that the controller has started on this machine.

        Last the settings, which say whose process it was.
        """
        for path in sorted((self._run_dir / "settings").glob(f"*{job_id}*.yaml")):
            if _job_of(path) != job_id:  # its name begins with that of this one
                continue
            name = path.stem
            discard(self._run_dir / "credentials" / name)
            _remove(self._run_dir / "workers" / name)
            logs = self._run_dir / "logs"
            for log_file in (*logs.glob(f"{name}.log*"), *logs.glob(f"{name}.out*")):
                log_file.unlink(missing_ok=True)
            targets_of(self._run_dir).forget(name)
            path.unlink(missing_ok=True)
        self._release_ports(job_id)
        for folder in ("settings", "processes"):
            discard_drafts(self._run_dir / folder)

    def _release_ports(self, job_id: str) -> None:
        """Those of processes without settings: they are chosen first, and kept by restarts."""
        ports = PortSlots(self._run_dir / "ports.json")
        with_settings = {path.stem for path in (self._run_dir / "settings").glob("*.yaml")}
        own = [slot for slot in ports.slots() if job_id in slot]
        ports.release(*(slot for slot in own if slot.partition(":")[0] not in with_settings))

    def _remove_stored(self, job_id: str) -> None:
        fs, root = self._opened()
        try:
            fs.rm(f"{root}/{job_id}", recursive=True)
        except FileNotFoundError:
            return

    def _opened(self) -> tuple[Any, str]:
        """The storage, and the path of the folders of jobs in it."""
        try:
            return filesystem_of(f"{self._storage}/jobs")
        except (ImportError, ValueError, OSError) as error:
            raise UnavailableError(f"storage: {self._storage!r}: {error}") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        discard(path)


def _job_of(settings: Path) -> str:
    try:
        found: Any = yaml.safe_load(settings.read_text())
    except (OSError, yaml.YAMLError):
        return ""
    return str(found.get("job_id", "")) if isinstance(found, dict) else ""
