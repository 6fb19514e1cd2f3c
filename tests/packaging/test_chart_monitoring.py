"""The chart's objects for Prometheus and Grafana."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.platform.telemetry.monitoring import DASHBOARDS, RULES
from paceline_harness.monitoring.prometheus import MISSING, installed
from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 1 << 20  # of a ConfigMap

Object = dict[str, Any]
Render = Callable[..., list[Object]]
Pods = Callable[[list[Object]], dict[str, Object]]


def of_kind(objects: list[Object], kind: str, part: str = "") -> list[Object]:
    return [one for one in objects if one["kind"] == kind and part in one["metadata"]["name"]]


def boards(objects: list[Object]) -> dict[str, Object]:
    maps = of_kind(objects, "ConfigMap", "-dashboard-")
    return {key: one for one in maps for key in one["data"]}


def test_monitoring_objects_are_opt_in(render: Render, pods: Pods) -> None:
    objects = render()
    assert not of_kind(objects, "PodMonitor")
    assert not of_kind(objects, "PrometheusRule")
    assert not boards(objects)
    for template in pods(objects).values():
        assert "prometheus.io/scrape" not in template["metadata"].get("annotations", {})


def test_every_dashboard_is_a_config_map_that_the_sidecar_finds(render: Render) -> None:
    found = boards(render("monitoring"))
    assert set(found) == {f"paceline-{path.name}" for path in DASHBOARDS.glob("*.json")}
    for key, one in found.items():
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "Training"}
        source = DASHBOARDS / key.removeprefix("paceline-")
        assert json.loads(one["data"][key]) == json.loads(source.read_text())
        assert len(json.dumps(one)) < MOST_BYTES


def test_the_sidecar_may_look_elsewhere(render: Render) -> None:
    for one in boards(render("monitoring-plain")).values():
        assert one["metadata"]["namespace"] == "grafana"
        assert one["metadata"]["labels"]["dashboards"] == "paceline"


def rules_of(text: str) -> list[Object]:
    return yaml.safe_load(text)["groups"]


def expected_rules(runbooks: str) -> list[Object]:
    found: list[Object] = []
    for path in sorted(RULES.glob("*.yaml")):
        found += rules_of(path.read_text().replace("docs/runbooks.md#", f"{runbooks}#"))
    return found


def test_the_operator_gets_all_rules_with_the_runbooks_of_the_values(render: Render) -> None:
    (one,) = of_kind(render("monitoring"), "PrometheusRule")
    assert one["metadata"]["labels"]["release"] == "prometheus"
    assert one["spec"]["groups"] == expected_rules("https://runbooks.example.com/paceline")
    assert "https://runbooks.example.com/paceline#pacelineledgerinconsistent" in json.dumps(one)


def test_without_operator_they_are_files(render: Render) -> None:
    (one,) = of_kind(render("monitoring-plain"), "ConfigMap", "-rules")
    assert set(one["data"]) == {path.name for path in RULES.glob("*.yaml")}
    groups = [group for _, text in sorted(one["data"].items()) for group in rules_of(text)]
    assert groups == expected_rules("docs/runbooks.md")


def test_series_get_the_labels_used_in_queries(render: Render) -> None:
    (one,) = of_kind(render("monitoring"), "PodMonitor")
    (endpoint,) = one["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    assert {"app", "service", "job"} <= {rule["targetLabel"] for rule in endpoint["relabelings"]}
    assert endpoint["port"] == "metrics"


def test_every_pod_with_metrics_can_be_found_by_annotations(render: Render, pods: Pods) -> None:
    templates = pods(render("monitoring-plain"))
    with_metrics = {
        name: template
        for name, template in templates.items()
        for container in template["spec"]["containers"]
        if any(port["name"] == "metrics" for port in container.get("ports", []))
    }
    assert len(with_metrics) == 7
    for template in with_metrics.values():
        annotations = template["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == "8401"
        assert annotations["prometheus.io/scrape"] == "true"


def test_prometheus_is_let_in(render: Render) -> None:
    values = yaml.safe_load((ROOT / "deploy/helm/paceline/ci/monitoring-values.yaml").read_text())
    peers = values["networkPolicy"]["prometheusFrom"]
    policies = of_kind(render("monitoring"), "NetworkPolicy")
    for component in ("gateway", "controller", "experience", "environment", "reward"):
        (one,) = [p for p in policies if p["metadata"]["name"].endswith(f"-{component}")]
        assert {"from": peers, "ports": [{"protocol": "TCP", "port": 8401}]} in one["spec"][
            "ingress"
        ]


def scrape_config() -> str:
    """The configuration for Prometheus without the operator, from docs/monitoring.md."""
    text = (ROOT / "docs" / "monitoring.md").read_text()
    (found,) = [part for part in text.split("```yaml\n")[1:] if part.startswith("# prometheus.yml")]
    return found.partition("```")[0]


@pytest.mark.skipif(not installed("promtool"), reason=MISSING)
def test_the_scrape_configuration_of_the_documents_is_one(tmp_path: Path) -> None:
    # Debian's Prometheus cannot look for pods; the rest of the file it can check.
    found, pods = scrape_config(), "kubernetes_sd_configs:\n      - role: pod"
    assert pods in found
    (tmp_path / "prometheus.yml").write_text(found.replace(pods, "static_configs: []"))
    command = ["promtool", "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = yaml.safe_load(found)["scrape_configs"]
    assert job["honor_labels"] is True
    wanted = {"app", "service", "job", "instance"}
    assert wanted <= {rule.get("target_label") for rule in job["relabel_configs"]}
    # A pod that has ended does not answer, and is not down.
    assert {
        "source_labels": ["__meta_kubernetes_pod_phase"],
        "regex": "Pending|Running",
        "action": "keep",
    } in job["relabel_configs"]
