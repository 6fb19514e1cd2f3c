"""Helpers for processes of tests: what they fork from, who is killed, where ranks compute."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.errors import UnavailableError
from paceline.front.local import fork_server
from paceline.front.local.fork_server import PRELOADED, ForkServer, launch_shared
from paceline.front.local.processes import ENVIRONMENT
from paceline.platform.files import locked

ON_CPU: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ""}
"""Added to the environment of ranks that may get no GPU."""


def place_of(ranks: int) -> Mapping[str, str]:
    """What to add to the environment of ranks: without a GPU for each, they see none."""
    import torch

    return {} if torch.cuda.device_count() >= ranks else ON_CPU


def share_fork_server(folder: Path) -> None:
    """Let the platforms of all test processes fork their services from one process."""
    from paceline.enums import WorkerKind

    if not fork_server.is_useful():
        return
    path = str(folder / "forks")
    with locked(folder / "forks.lock"):
        try:
            ForkServer.connect(path).close()
        except UnavailableError:
            Path(path).unlink(missing_ok=True)
            environment = {**os.environ, **ENVIRONMENT}
            output = folder / "forks.out"
            # Of several test processes, the first one to need it may not be the last one to end.
            owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
            modules = [*PRELOADED, *(f"paceline_{kind}.service" for kind in WorkerKind)]
            launch_shared(modules, path=path, output=output, environment=environment, owner=owner)
    os.environ[fork_server.SHARED] = path


def goes_on(process: psutil.Process) -> bool:
    """Whether a process is still running; a zombie is not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def warm_process() -> psutil.Process:
    """The warm process of the only sandbox of this process."""
    (found,) = _warm_processes(psutil.Process())
    return found


def sealed_processes(service: psutil.Process | None = None) -> list[psutil.Process]:
    """What the sandboxes of a process, by default this one, have started.

    It may have other children, such as the store of a test session.
    """
    warm = _warm_processes(service or psutil.Process())
    return [child for each in warm for child in each.children(recursive=True)]


def _warm_processes(service: psutil.Process) -> list[psutil.Process]:
    return [each for each in service.children() if "zygote" in _command(each)]


def _command(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # nor if it is a zombie
        return " ".join(process.cmdline())
    return ""
