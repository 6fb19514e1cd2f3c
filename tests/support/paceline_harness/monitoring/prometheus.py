"""Runs a real Prometheus (Debian's) in tests, with given targets and rules."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from paceline.platform.files import read_json
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import PLAIN, free_port

MISSING = "prometheus is not installed: run make monitoring-tools (Debian, as root)"
START_S = PATIENCE_S
CALL_S = 30.0


def installed(*tools: str) -> bool:
    """Whether these commands are installed; by default `prometheus` and `promtool`."""
    return all(shutil.which(tool) is not None for tool in tools or ("prometheus", "promtool"))


@dataclass(frozen=True, slots=True)
class Sample:
    """One element of an instant vector."""

    labels: dict[str, str]
    value: float


@dataclass(slots=True)
class Prometheus:
    """One server on 127.0.0.1 with its files below `folder`.

    `rules` are rule files in which `[5m]` is replaced by `[<window>]`, so that production's files
    can be tested in seconds; a rule's own `interval` is kept. `scrape` changes the targets while
    the server runs.
    """

    folder: Path
    rules: Sequence[Path] = ()
    window: str = "5m"
    interval_s: float = 1.0
    timeout_s: float | None = None  # of a scrape; the scrape interval if None
    port: int = 0
    config: Path | None = None  # use this configuration file and ignore the fields above
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, targets: Mapping[str, Iterable[str]] | None = None) -> Prometheus:
        """Start it and wait until it is ready; `targets` are host:port by scrape job."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        config = self.config or self._write(targets or {})
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
            "--query.lookback-delta=30s",
        ]
        with (self.folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait_until_ready()
        return self

    def stop(self) -> None:
        """Stop the server."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> Prometheus:
        return self if self._process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def scrape(self, targets: Mapping[str, Iterable[str]]) -> None:
        """Replace the targets; it rereads them every second."""
        groups = [
            {"targets": sorted(found), "labels": {"target": name}}
            for name, found in sorted(targets.items())
        ]
        draft = self.folder / "targets.tmp"
        draft.write_text(json.dumps(groups))
        draft.replace(self.folder / "targets.json")

    def query(self, expression: str) -> list[Sample]:
        """Evaluate an expression to an instant vector; a scalar is a sample without labels.

        Raises:
            ValueError: Prometheus rejects the expression; the message has the reason.
        """
        data = self._get("query", query=expression)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(each["metric"], float(each["value"][1])) for each in data["result"]]

    def value(self, expression: str) -> float | None:
        """The only value of an expression; None if it has none or several."""
        found = self.query(expression)
        return found[0].value if len(found) == 1 else None

    def until(
        self, expression: str, check: Callable[[list[Sample]], bool], *, timeout_s: float = 60.0
    ) -> list[Sample]:
        """Poll an expression until its result passes; returns the result.

        Raises:
            TimeoutError: it never passed; the message has the last result.
        """
        deadline = time.monotonic() + timeout_s
        while not check(found := self.query(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression}: {found} after {timeout_s:g} s")
            time.sleep(min(self.interval_s, 0.5))
        return found

    def alerts(self) -> list[dict[str, Any]]:
        """Pending and firing alerts, as reported by the API."""
        return self._get("alerts")["alerts"]

    def rule_groups(self) -> list[dict[str, Any]]:
        """All rule groups with the health of each rule and its last error."""
        return self._get("rules")["groups"]

    def targets(self) -> list[dict[str, Any]]:
        """Active targets with their health and last error."""
        return self._get("targets")["activeTargets"]

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{what}"
        reply = httpx.get(url, params=parameters, timeout=CALL_S, verify=PLAIN)
        content: dict[str, Any] = reply.json()
        if content["status"] != "success":
            raise ValueError(f"{content['errorType']}: {content['error']}")
        return content["data"]

    def _write(self, targets: Mapping[str, Iterable[str]]) -> Path:
        self.scrape(targets)
        config = self.folder / "prometheus.yml"
        config.write_text(json.dumps(self._config()))
        return config

    def _config(self) -> dict[str, Any]:
        interval = f"{int(self.interval_s * 1000)}ms"
        timeout_s = self.interval_s if self.timeout_s is None else self.timeout_s
        return {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": f"{int(timeout_s * 1000)}ms",
                "evaluation_interval": interval,
            },
            "rule_files": [str(self._windowed(path)) for path in self.rules],
            "scrape_configs": [
                {
                    "job_name": "paceline",
                    "honor_labels": True,  # `job` is a training job
                    "file_sd_configs": [
                        {
                            "files": [str(self.folder / "targets.json")],
                            "refresh_interval": "1s",
                        }
                    ],
                }
            ],
        }

    def _windowed(self, path: Path) -> Path:
        copy = self.folder / "rules" / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text().replace("[5m]", f"[{self.window}]"))
        return copy

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self._process is not None
            try:
                if httpx.get(f"{self.url}/-/ready", timeout=CALL_S, verify=PLAIN).is_success:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                log = (self.folder / "prometheus.log").read_text()
                raise RuntimeError(f"prometheus did not start: {log[-2000:]}")
            time.sleep(0.05)


def local_targets(run_dir: Path, names: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Metrics addresses of the processes of a run directory, by name (`rollout-...`).

    Limited to `names` if given, since ended processes keep their ports.
    """
    ports: dict[str, int] = read_json(run_dir / "ports.json") or {}
    wanted = None if names is None else set(names)
    found: dict[str, list[str]] = {}
    for slot, port in ports.items():
        name, _, what = slot.rpartition(":")
        if what == "metrics" and (wanted is None or name in wanted):
            found[name] = [f"127.0.0.1:{port}"]
    return found
