"""Which run directory a command is about: a named one, or the last one on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
from argparse import Namespace
from pathlib import Path
from urllib.parse import urlsplit

from paceline.platform.files import read_json

DEFAULT_RUN_DIR = Path("runs/local")
VARIABLE = "PACELINE_RUN_DIR"
_CONNECT_S = 2.0


def named_run_dir(arguments: Namespace) -> Path | None:
    """The run directory of `--run-dir`, else of `PACELINE_RUN_DIR`; None if neither names one."""
    folder = os.environ.get(VARIABLE, "")
    return arguments.run_dir or (Path(folder) if folder else None)


def run_dir_of(arguments: Namespace) -> Path:
    """The run directory of a command that reads its files.

    The named one; else `runs/local` if something runs there; else that of the last `run` or `up`
    of this user; else `runs/local`.
    """
    if (named := named_run_dir(arguments)) is not None:
        return named
    if live_url(DEFAULT_RUN_DIR):
        return DEFAULT_RUN_DIR
    return last_run() or DEFAULT_RUN_DIR


def live_url(run_dir: Path) -> str:
    """The URL of the gateway that runs in a run directory; empty if none answers there."""
    url = str((read_json(run_dir / "gateway.json") or {}).get("http", ""))
    parts = urlsplit(url)
    if parts.hostname and parts.port:
        with contextlib.suppress(OSError):
            socket.create_connection((parts.hostname, parts.port), timeout=_CONNECT_S).close()
            return url
    return ""


def remember(run_dir: Path) -> None:
    """Make this the last run directory of this user, where a home can be written to."""
    path = _memory()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(f"{run_dir.resolve()}\n")
        draft.replace(path)


def last_run() -> Path | None:
    """The run directory that was remembered last, if it is still there."""
    with contextlib.suppress(OSError):
        path = Path(_memory().read_text().strip())
        return path if path.is_dir() else None
    return None


def _memory() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local/state") / "paceline" / "last-run"
