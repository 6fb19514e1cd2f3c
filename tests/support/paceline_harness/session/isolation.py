"""Keeps tests away from whatever else is installed, configured or running on the machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

# Knobs of the tests themselves stay.
_KEPT = ("PACELINE_TEST_", "PACELINE_LEDGER_")
_DROPPED = ("PACELINE_", "HF_", "HUGGING_FACE_", "KUBE", "MLFLOW_", "OTEL_", "TRACKIO_", "WANDB_")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def isolate(environment: MutableMapping[str, str]) -> Path | None:
    """Give this process and its children a home and a folder of temporary files of their own.

    Variables that name installations, clusters and trackers are dropped, and proxies left out for
    this machine. What packages are installed from stays: pip's configuration, and caches.

    Returns:
        The folder to remove at the end; None in a process whose parent has done this already.
    """
    if "PACELINE_TEST_HOME" in environment:
        return None
    home, temporary = Path(environment.get("HOME", "/")), tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="paceline-tests-"))
    folder.chmod(0o755)  # sealed processes may have another user
    for name in [*environment]:
        if name.startswith(_DROPPED) and not name.startswith(_KEPT):
            del environment[name]
    settings = home / ".config" / "pip" / "pip.conf"
    if settings.exists():
        environment.setdefault("PIP_CONFIG_FILE", str(settings))
    environment.setdefault("XDG_CACHE_HOME", str(home / ".cache"))
    environment.setdefault("PYTEST_DEBUG_TEMPROOT", temporary)  # pytest keeps some for a while
    environment["HF_HOME"] = str(folder / "hub")
    environment["HOME"] = environment["PACELINE_TEST_HOME"] = str(folder)
    environment["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [environment.get(name), *_LOOPBACK]))
    return folder


def isolate_this_process() -> Path | None:
    """`isolate` the environment that this process and its children have."""
    made = isolate(os.environ)
    tempfile.tempdir = None  # asked for again
    return made


def remove(folder: Path | None) -> None:
    """Remove what `isolate` has made."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
