"""A whole platform on this machine: `paceline up` as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from paceline.front.client.client import Client
from paceline.platform.files import read_json, token_of
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import PLAIN

START_S = PATIENCE_S
STOP_S = PATIENCE_S


@dataclass(slots=True)
class Platform:
    """`paceline up` as a separate process."""

    run_dir: Path
    http: str
    grpc: str
    up: subprocess.Popen[bytes]

    @classmethod
    def start(cls, run_dir: Path, *more: str) -> Platform:
        """Start a platform; returns once jobs can be submitted."""
        command = [sys.executable, "-m", "paceline.front.cli", "up", "--run-dir", str(run_dir)]
        up = subprocess.Popen([*command, "--port", "0", *more])
        try:
            addresses = addresses_of(up, run_dir)
        except BaseException:
            end(up)
            raise
        return cls(run_dir, addresses["http"], addresses["grpc"], up)

    @property
    def headers(self) -> dict[str, str]:
        """The authorization header for its gateway."""
        return {"authorization": f"Bearer {token_of(self.run_dir)}"}

    def client(self) -> Client:
        """An SDK client of its gateway."""
        token = token_of(self.run_dir)
        return Client(self.http, token=token, timeout_s=60.0, outage_s=START_S)

    def pid_of(self, name: str) -> int:
        """Process id of a started process, by name or prefix.

        Waits for one that is being started: until then its id is 0, and a signal to 0 would go to
        the sender's own process group.
        """
        deadline = time.monotonic() + START_S
        while True:
            records = sorted((self.run_dir / "processes").glob(f"{name}*.json"))
            content = read_json(records[-1]) if records else None
            if content is not None and content["pid"]:
                return int(content["pid"])
            assert time.monotonic() < deadline, f"no process {name}"
            time.sleep(0.02)

    def pids(self, kind: str = "", job_id: str = "") -> dict[str, int]:
        """Process ids by name: of all that are there now, and of this kind and job if given.

        One that is being started is waited for, and one that goes meanwhile is left out.
        """
        found: dict[str, int] = {}
        for name in self.names():
            if not name.startswith(kind) or job_id not in name:
                continue
            path = self.run_dir / "processes" / f"{name}.json"
            while (content := read_json(path)) is not None and not content["pid"]:
                time.sleep(0.02)
            if content is not None:
                found[name] = int(content["pid"])
        return found

    def names(self) -> list[str]:
        """Names of all started processes."""
        return sorted(path.stem for path in (self.run_dir / "processes").glob("*.json"))

    def stop(self) -> None:
        """Send SIGTERM and wait until everything has stopped."""
        end(self.up)

    def logs(self) -> str:
        """The last lines of all logs, for failed tests."""
        tails = [f"{p.name}:\n{p.read_text()[-2000:]}" for p in (self.run_dir / "logs").iterdir()]
        return "\n".join(tails)


def addresses_of(up: subprocess.Popen[bytes], run_dir: Path) -> dict[str, Any]:
    """Wait until jobs can be submitted; returns what the gateway wrote into `gateway.json`."""
    deadline = time.monotonic() + START_S
    # The gateway publishes its address before the experience service, which it needs, is up.
    while not is_ready(addresses := read_json(run_dir / "gateway.json")):
        assert up.poll() is None, "paceline up ended"
        assert time.monotonic() < deadline, "the gateway did not start"
        time.sleep(0.1)
    assert addresses is not None
    return addresses


def end(up: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to `paceline up`; returns once everything has stopped."""
    if up.poll() is None:
        up.send_signal(signal.SIGTERM)
    up.wait(STOP_S)


def is_ready(addresses: dict[str, Any] | None) -> bool:
    """Whether jobs can be submitted to the gateway at these addresses."""
    if addresses is None:
        return False
    with suppress(httpx.TransportError):
        url = f"{addresses['http']}/readyz"
        return httpx.get(url, timeout=START_S, verify=PLAIN).is_success
    return False
