"""The harness's Prometheus: scrapes, evaluates rules, reports errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.platform.server.health import Health, Probes
from paceline.platform.telemetry.metrics import Metrics
from paceline_harness.monitoring.prometheus import Prometheus

RULES = """
groups:
  - name: test
    rules:
      - record: test:steps:rate
        expr: sum by (job) (increase(paceline_step[5m])) >= 0
"""


def test_a_server_scrapes_and_evaluates(
    prometheus: Callable[..., Prometheus], until: Callable[..., None], tmp_path: Path
) -> None:
    metrics = Metrics()
    metrics.set("step", 7, job="a-1")
    probes = Probes(host="127.0.0.1", port=0, health=Health(), metrics=metrics)
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    try:
        server = prometheus(
            {"experience": [f"127.0.0.1:{probes.port}"]}, rules=[rules], window="10s"
        )
        found = server.until("paceline_step", bool)
        assert found[0].value == 7
        assert found[0].labels["job"] == "a-1"
        assert server.until("test:steps:rate", bool)[0].labels["job"] == "a-1"
        assert server.value("1 + 1") == 2
        # Scrapes time out after a second; a late one is followed by one in time.
        until(lambda: [target["health"] for target in server.targets()] == ["up"], "not up")
        assert server.rule_groups()[0]["rules"][0]["health"] == "ok"
        with pytest.raises(ValueError, match="parse error"):
            server.query("sum(")
    finally:
        probes.close()
