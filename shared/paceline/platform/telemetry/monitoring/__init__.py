"""Files for Prometheus and Grafana: rules, dashboards, and the scrape targets of a run directory.

`dashboards/` and `rules/` come from the chart, deploy/helm/paceline/files/monitoring. A wheel has a
copy of them beside this file; a checkout reads the originals.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from paceline.platform.files import discard, write_json

PACKAGE = Path(__file__).parent
CHART = PACKAGE.parents[4] / "deploy" / "helm" / "paceline" / "files" / "monitoring"
SOURCE = PACKAGE if (PACKAGE / "dashboards").is_dir() else CHART
DASHBOARDS = SOURCE / "dashboards"
RULES = SOURCE / "rules"
PROMETHEUS_URL = "http://127.0.0.1:9090"
TARGETS = "targets"


class Targets:
    """Prometheus's file-based scrape targets, one file per process, reloaded within a second.

    Several supervisors may share the folder; names are unique in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tell(self, name: str, *, address: str, labels: Mapping[str, str]) -> None:
        """Add or update the target of a process at host:port; empty labels are left out."""
        shown = {"app": "paceline"} | {key: value for key, value in labels.items() if value}
        write_json(self._folder / f"{name}.json", [{"targets": [address], "labels": shown}])

    def forget(self, name: str) -> None:
        """Remove the target of a process that is gone for good."""
        discard(self._folder / f"{name}.json")


def targets_of(run_dir: Path) -> Targets:
    """The scrape targets of a run directory."""
    return Targets(run_dir / "monitoring" / TARGETS)


def lay_out(folder: Path) -> None:
    """Write what `prometheus --config.file` and Grafana's provisioning need into `folder`."""
    for source in (DASHBOARDS, RULES):
        place = folder / source.name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source, place, copy_function=shutil.copyfile)  # not their modes
    (folder / TARGETS).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(PACKAGE / "prometheus.yml", folder / "prometheus.yml")
    for name, content in _provisioning(folder / DASHBOARDS.name).items():
        path = folder / "grafana" / name / "paceline.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False))


def _provisioning(dashboards: Path) -> dict[str, dict[str, object]]:
    source = {
        "name": "Paceline",
        "uid": "paceline",
        "type": "prometheus",
        "access": "proxy",
        "url": PROMETHEUS_URL,
        "isDefault": True,
        "jsonData": {"timeInterval": "5s"},
    }
    provider = {
        "name": "paceline",
        "folder": "Paceline",
        "type": "file",
        "options": {"path": str(dashboards.resolve())},
    }
    return {
        "datasources": {"apiVersion": 1, "datasources": [source]},
        "dashboards": {"apiVersion": 1, "providers": [provider]},
    }
