"""Prometheus and Grafana in the compose file."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.platform.telemetry.monitoring import DASHBOARDS, RULES
from paceline_harness.monitoring.prometheus import MISSING, installed
from paceline_harness.patience import PATIENCE_S

DOCKER = Path(__file__).resolve().parents[2] / "docker"
FILE = DOCKER / "compose.monitoring.yaml"


@pytest.fixture
def found() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def test_it_follows_the_schema_of_compose() -> None:
    tool = Path(sys.executable).parent / "check-jsonschema"
    command = [tool, "--builtin-schema", "vendor.compose-spec", FILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_closed_and_has_no_password_of_its_own(found: dict[str, Any]) -> None:
    for entry in found["services"].values():
        assert entry["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in entry["ports"])
        assert re.search(r":v?\d+\.\d+\.\d+$", entry["image"])
    assert found["configs"]["password"]["content"].startswith("${GRAFANA_PASSWORD:?")
    environment = found["services"]["grafana"]["environment"]
    mounted = {c["target"]: c["source"] for c in found["services"]["grafana"]["configs"]}
    assert mounted[environment["GF_SECURITY_ADMIN_PASSWORD__FILE"]] == "password"


def test_it_takes_the_files_of_the_package(found: dict[str, Any]) -> None:
    for service, source in (("prometheus", RULES), ("grafana", DASHBOARDS)):
        mounts = [v.split(":") for v in found["services"][service]["volumes"]]
        (target,) = [t[1] for t in mounts if (DOCKER / t[0]).resolve() == source.resolve()]
        texts = [config["content"] for config in found["configs"].values()]
        assert any(target in text for text in texts)
    declared = yaml.safe_load((DOCKER / "compose.yaml").read_text())["volumes"] | found["volumes"]
    for entry in found["services"].values():
        named = [volume.split(":")[0] for volume in entry["volumes"]]
        assert all(name in declared or name.startswith("..") for name in named)


@pytest.mark.skipif(not installed("promtool"), reason=MISSING)
def test_prometheus_takes_its_configuration(found: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    # As compose does with `$$`.
    path.write_text(found["configs"]["prometheus"]["content"].replace("$$", "$"))
    command = ["promtool", "check", "config", "--syntax-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'replacement: "controller:$1"' in path.read_text()


def test_workers_beside_the_controller_can_be_reached() -> None:
    content = yaml.safe_load((DOCKER / "compose.yaml").read_text())["configs"]["controller"]
    assert yaml.safe_load(content["content"])["metrics_host"] == "0.0.0.0"
