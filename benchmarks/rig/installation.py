"""An installation on this machine, by `paceline up`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rig.smoke import OneJob

from paceline.front.client import Client
from paceline.platform.files import token_of

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S = 180.0, 180.0


@contextmanager
def installed(*options: str, smoke: Path | None = None) -> Generator[Path]:
    """The run directory of an installation with these options of `paceline up`.

    A smoke uses the running one of its folder if there is one and no options are needed.
    """
    if smoke is not None and not options and (smoke / "run" / "gateway.json").exists():
        yield smoke / "run"
        return
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        run_dir = Path(folder)
        command = [
            sys.executable,
            "-m",
            "paceline.front.cli",
            "up",
            "--port",
            "0",
            "--run-dir",
            folder,
        ]
        with (run_dir / "up.log").open("w") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log, cwd=ROOT)
        try:
            _until_ready(run_dir, process)
            yield run_dir
        finally:
            process.terminate()
            process.wait(STOP_S)


@contextmanager
def serving(smoke: Path | None = None) -> Generator[Client]:
    """A client of an installation; that of a smoke trains one job for all."""
    with installed(smoke=smoke) as run_dir, _client(run_dir, smoke) as client:
        yield client


def _client(run_dir: Path, smoke: Path | None) -> Client:
    url, token = url_of(run_dir), token_of(run_dir)
    if smoke is None:
        return Client(url, token=token)
    return OneJob(url, token=token, model=smoke.resolve() / "model")


def url_of(run_dir: Path) -> str:
    """URL of its REST API."""
    return str(json.loads((run_dir / "gateway.json").read_text())["http"])


def _until_ready(run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not _is_ready(run_dir):
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError((run_dir / "up.log").read_text())
        time.sleep(0.1)


def _is_ready(run_dir: Path) -> bool:
    """Whether jobs can be submitted: the gateway may be up before what it needs."""
    if not (run_dir / "gateway.json").exists():
        return False
    try:
        return httpx.get(f"{url_of(run_dir)}/readyz", timeout=START_S, trust_env=False).is_success
    except httpx.TransportError:
        return False
