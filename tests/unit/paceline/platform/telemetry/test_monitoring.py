"""Files for Prometheus and Grafana in a run directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.front.local.processes import Processes
from paceline.platform.telemetry.monitoring import DASHBOARDS, RULES, Targets, lay_out, targets_of
from paceline_harness.monitoring.prometheus import MISSING, installed
from paceline_harness.patience import PATIENCE_S

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def told(folder: Path) -> dict[str, object]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_a_target_exists_until_it_is_forgotten(tmp_path: Path) -> None:
    targets = Targets(tmp_path)
    labels = {"service": "reward", "job": ""}
    targets.tell("reward-0", address="127.0.0.1:1", labels=labels)
    group = {"targets": ["127.0.0.1:1"], "labels": {"app": "paceline", "service": "reward"}}
    assert told(tmp_path) == {"reward-0": [group]}
    targets.forget("reward-0")
    targets.forget("reward-0")
    assert told(tmp_path) == {}


def test_processes_are_targets_while_they_are_wanted(tmp_path: Path) -> None:
    targets = targets_of(tmp_path)
    folder = tmp_path / "monitoring" / "targets"
    processes = Processes(folder=tmp_path / "p", logs=tmp_path / "logs", targets=targets)
    mark = str(tmp_path / "mark")
    labels = {"service": "rollout", "job": "a", "metrics": "127.0.0.1:2"}
    processes.start("rollout-0", [*SLEEP, mark], mark=mark, labels=labels)
    processes.start("store", [*SLEEP, mark + "2"], mark=mark + "2")
    shown = {"app": "paceline", "service": "rollout", "job": "a"}
    assert told(folder) == {"rollout-0": [{"targets": ["127.0.0.1:2"], "labels": shown}]}
    # A process that is down stays a target, so that its absence is visible.
    processes.kill("rollout-0")
    assert "rollout-0" in told(folder)
    processes.forget("rollout-0")
    assert told(folder) == {}
    processes.kill("store")


def test_laying_out_files_can_be_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "monitoring"
    lay_out(folder)
    targets_of(tmp_path).tell("reward-0", address="127.0.0.1:1", labels={})
    (folder / "rules" / "of-an-older-version.yaml").write_text("groups: []")
    lay_out(folder)
    assert {p.name for p in (folder / "rules").iterdir()} == {p.name for p in RULES.iterdir()}
    assert {p.name for p in (folder / "dashboards").iterdir()} == {
        p.name for p in DASHBOARDS.iterdir()
    }
    assert list(told(folder / "targets")) == ["reward-0"]
    provider = yaml.safe_load((folder / "grafana" / "dashboards" / "paceline.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == str(folder / "dashboards")
    source = yaml.safe_load((folder / "grafana" / "datasources" / "paceline.yaml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"


@pytest.mark.skipif(not installed("promtool"), reason=MISSING)
def test_prometheus_accepts_the_laid_out_files(tmp_path: Path) -> None:
    lay_out(tmp_path)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout
