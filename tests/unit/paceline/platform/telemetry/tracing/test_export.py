"""Export to a real OTLP server on loopback."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import validate
from paceline.config.service import ServiceSettings, TracingSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF, Tracer, episode_context, start
from paceline_harness.otlp import Collector
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port

ROOT = episode_context("job.1", 0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def process(endpoint: str, **fields: Any) -> ServiceSettings:
    tracing = {"endpoint": endpoint, "sample": 1.0, "every_s": 0.05, "timeout_s": 60.0, **fields}
    return ServiceSettings(
        kind=WorkerKind.REWARD, worker_id="reward-0", tracing=validate(TracingSettings, tracing)
    )


def counted(metrics: Metrics, outcome: str) -> float:
    found = metrics.registry.get_sample_value("paceline_spans_total", {"outcome": outcome})
    return found or 0.0


def until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_span_arrives_as_it_was(collector: Collector) -> None:
    metrics = Metrics()
    tracer = start(process(collector.endpoint), metrics)
    other = episode_context("job.2", 0)
    with tracer.root("episode", ROOT, job="a", share=0.5, versions=[1, 2]) as root:
        root.links = [other]
        root.child("ask", {"gen_ai.usage.output_tokens": 3}, kind="client").end(error="gone")
        root.event("swap", version=2)
    tracer.close(60)
    child, parent = collector.spans()
    assert (child.parent_id, child.error, child.is_call) == (parent.span_id, "gone", True)
    assert child.attributes == {"gen_ai.usage.output_tokens": 3}
    assert (parent.trace_id, parent.parent_id) == (ROOT.trace_id, "")
    assert parent.attributes["paceline.job"] == "a"
    assert parent.attributes["paceline.versions"] == [1, 2]
    assert parent.events == ("swap",)
    assert parent.links == ((other.trace_id, f"{other.span:016x}"),)
    assert (parent.service, parent.worker) == ("paceline-reward", "reward-0")
    assert parent.end_ns >= parent.start_ns > 1e18
    assert counted(metrics, "sent") == 2


def test_headers_from_a_file_are_sent(collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("# of the backend\nX-Api-Key: secret:1\n\n")
    tracer = start(process(collector.endpoint, headers_file=str(tmp_path / "headers")), Metrics())
    tracer.root("episode", ROOT).end()
    tracer.close(60)
    assert collector.headers["x-api-key"] == "secret:1"


def test_a_malformed_header_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("a: b\nBearer sesame\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        start(process("http://x:1", headers_file=str(tmp_path / "headers")), Metrics())
    assert "sesame" not in str(caught.value)
    with pytest.raises(ConfigError, match="headers_file: cannot read"):
        start(process("http://x:1", headers_file=str(tmp_path / "none")), Metrics())


@pytest.mark.parametrize("endpoint", ["", "collector:4317", "ftp://a:1", "http://a:1/v1/traces"])
def test_an_endpoint_is_a_url_of_a_host(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        process(endpoint)


def fill(tracer: Tracer, count: int) -> None:
    for _ in range(count):
        tracer.root("episode", ROOT).end()


def test_an_outage_is_logged_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Outside the ephemeral range, so that its port stays free meanwhile.
    metrics, collector = Metrics(), Collector(free_port())
    collector.start()
    collector.stop()
    tracer = start(process(collector.endpoint, timeout_s=1.0), metrics)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            lost = counted(metrics, "failed")
            fill(tracer, 4)
            until(lambda lost=lost: counted(metrics, "failed") > lost)
        collector.start()
        try:
            for _ in range(600):
                fill(tracer, 1)
                time.sleep(0.1)
                if counted(metrics, "sent"):
                    break
            assert counted(metrics, "sent")
        finally:
            collector.stop()
    tracer.close(5)
    said = [record.getMessage() for record in caplog.records if record.name == "tracing"]
    assert said[:2] == ["cannot export traces", "exporting traces again"]
    assert not [r for r in caplog.records if r.name.startswith("opentelemetry")]


def test_spans_beyond_the_queue_are_counted_and_dropped() -> None:
    metrics = Metrics()
    tracer = start(
        process("http://127.0.0.1:1", queue=16, batch=8, every_s=60.0, timeout_s=1.0), metrics
    )
    fill(tracer, 1000)
    until(lambda: counted(metrics, "failed") + counted(metrics, "dropped") >= 1000 - 16)
    assert counted(metrics, "dropped") >= 1000 - 16 - 8 - counted(metrics, "failed")
    tracer.close(0.1)


def test_close_respects_its_timeout() -> None:
    tracer = start(process("http://127.0.0.1:1", timeout_s=60.0), Metrics())
    fill(tracer, 10)
    begun = time.monotonic()
    tracer.close(0.2)
    assert time.monotonic() - begun < 30  # of the minute allowed for sending


def test_off_without_the_section() -> None:
    settings = ServiceSettings(kind=WorkerKind.REWARD, worker_id="reward-0")
    assert start(settings, Metrics()) is OFF
