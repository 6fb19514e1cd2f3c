"""The metrics of a process: kinds, totals, bounded labels, finished jobs."""

import asyncio

import pytest

from paceline.platform.telemetry.metric_names import NAMES, OTHER, VALUES
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.usage import STALL_TICKS, TICK_S, Usage
from paceline_experience.ledger.meter import JobMeter
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import FakeClock


def read(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_metrics_are_created_on_first_use_with_their_labels() -> None:
    metrics = Metrics()
    metrics.add("tokens", 3, job="a")
    metrics.set("step", 4, job="a")
    metrics.observe("staleness", [0, 1], job="a")
    assert read(metrics, "paceline_generated_tokens_total", job="a") == 3
    assert read(metrics, "paceline_staleness_steps_count", job="a") == 2
    with pytest.raises(TypeError, match="tokens is a Counter"):
        metrics.set("tokens", 1, job="a")
    with pytest.raises(ValueError, match="tokens: labels"):
        metrics.add("tokens", 1, step="a")


def test_names_have_units_and_bounded_labels() -> None:
    full = [spec.name for spec in NAMES.values()]
    assert len(set(full)) == len(full)
    for spec in NAMES.values():
        assert spec.name.startswith("paceline_")
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert len(spec.buckets) <= 8
        for label in spec.labels:
            assert label == "job" or label in VALUES, f"{spec.name}: {label} has no bound"


def test_an_external_total_continues_and_resets_when_it_falls() -> None:
    metrics = Metrics()
    for value, shown in ((100, 100), (130, 130), (130, 130), (7, 7)):
        metrics.total("trained_tokens", value, job="a")
        assert read(metrics, "paceline_trained_tokens_total", job="a") == shown


def test_label_values_beyond_the_limit_become_other() -> None:
    metrics = Metrics()
    metrics.add("dropped", job="a", reason="nonsense")
    assert read(metrics, "paceline_dropped_episodes_total", job="a", reason=OTHER) == 1
    most = VALUES["statistic"]
    assert isinstance(most, int)
    for job in ("a", "b"):
        for number in range(100):
            metrics.set("objective", 1, job=job, statistic=f"s{number}")
        assert read(metrics, "paceline_objective", job=job, statistic="s0") == 1
        assert read(metrics, "paceline_objective", job=job, statistic=f"s{most}") is None
    samples = [s for m in metrics.registry.collect() for s in m.samples]
    assert sum(s.name == "paceline_objective" for s in samples) == 2 * (most + 1)


def test_forgetting_a_job_removes_its_series() -> None:
    metrics = Metrics()
    metrics.add("expired", job="a")
    metrics.total("trained_tokens", 5, job="a")
    metrics.set("step", 3, job="b")
    metrics.forget("a")
    assert metrics.num_children == 1
    assert read(metrics, "paceline_step", job="b") == 3
    assert read(metrics, "paceline_trained_tokens_total", job="a") is None
    metrics.total("trained_tokens", 5, job="a")
    assert read(metrics, "paceline_trained_tokens_total", job="a") == 5


def test_a_gauge_can_be_computed_at_scrape_time() -> None:
    metrics, clock = Metrics(), FakeClock()
    metrics.follow("token_age", lambda: clock.now_s - 1000.0, job="a")
    clock.pass_s(7)
    assert read(metrics, "paceline_token_age_seconds", job="a") == 7


class Bench:
    """A usage meter on a fake clock; `each` as in environments."""

    def __init__(self, *, each: bool = False, service: str = "environment") -> None:
        self.metrics, self.clock, self.service = Metrics(), FakeClock(), service
        self.usage = Usage(self.metrics, service=service, each=each, clock=self.clock)

    def pass_s(self, seconds: float) -> None:
        """Advance time while the event loop runs."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.pass_s(TICK_S)
            self.usage.sample()

    def freeze_s(self, seconds: float) -> None:
        """Advance time while the process is suspended."""
        self.clock.pass_s(seconds)
        self.usage.sample()

    def seconds(self, name: str, **labels: str) -> float:
        full = f"paceline_{name}_seconds_total"
        return read(self.metrics, full, service=self.service, **labels) or 0.0


def test_open_waits_count_before_they_end() -> None:
    bench = Bench()
    with bench.usage.wait("reward"):
        bench.pass_s(3)
        assert bench.seconds("wait", waiting_on="reward") == pytest.approx(3)
    bench.pass_s(2)
    assert bench.seconds("wait", waiting_on="reward") == pytest.approx(3)


def test_waits_add_up_over_episodes_but_not_over_calls_of_a_server() -> None:
    for each, seconds in ((True, 6), (False, 3)):
        bench = Bench(each=each)
        with bench.usage.wait("rollout"), bench.usage.wait("rollout"):
            bench.pass_s(3)
        assert bench.seconds("wait", waiting_on="rollout") == pytest.approx(seconds)


def test_a_suspended_process_counts_no_waits() -> None:
    bench = Bench(service="gateway")
    with bench.usage.wait("rollout"), bench.usage.handle():
        bench.pass_s(1)
        bench.freeze_s(9)
    assert bench.seconds("wait", waiting_on="rollout") == pytest.approx(1 + TICK_S)
    assert bench.seconds("stalled") == pytest.approx(9 - TICK_S)
    assert bench.seconds("handling") == pytest.approx(10)


def test_a_slightly_late_sample_is_not_a_stall() -> None:
    bench = Bench()
    bench.freeze_s(STALL_TICKS * TICK_S * 0.99)
    assert bench.seconds("stalled") == 0


async def test_a_watched_usage_exports_busy_seconds() -> None:
    metrics = Metrics()
    usage = Usage(metrics, service="reward")
    usage.measure_slots(lambda: 4.0, capacity=8)
    watching = asyncio.create_task(usage.watch())
    async with asyncio.timeout(PATIENCE_S):
        while not read(metrics, "paceline_busy_seconds_total", service="reward"):
            await asyncio.sleep(0.05)
    watching.cancel()
    assert read(metrics, "paceline_capacity", service="reward") == 8


def test_finished_jobs_leave_no_series() -> None:
    metrics = Metrics()
    for number in range(10_000):
        meter = JobMeter(metrics, f"job-{number}")
        meter.open()
        meter.expired(1)
        meter.decided([0.0, 1.0])
        meter.row("train", {"loss": 1.0, "staleness": {"0": 2}, "batch_episodes": 2})
        meter.close()
        meter.expired(1)  # late
    assert metrics.num_children == 0
    assert not [sample for metric in metrics.registry.collect() for sample in metric.samples]
