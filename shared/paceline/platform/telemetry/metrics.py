"""The metrics of one process, declared in `paceline.platform.telemetry.metric_names`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from paceline.platform.telemetry.metric_names import NAMES, OTHER, VALUES

Metric = TypeVar("Metric", Counter, Gauge, Histogram)
Values = tuple[str, ...]
Series = tuple[str, tuple[tuple[str, str], ...]]
_CLASSES: dict[str, type[Counter | Gauge | Histogram]] = {
    "counter": Counter,
    "gauge": Gauge,
    "histogram": Histogram,
}

disable_created_metrics()
_OF_PROCESS = (
    "process_cpu_seconds",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_max_fds",
)


class _Process(Collector):
    """The subset of the standard process metrics in use; each costs one series per worker."""

    def __init__(self) -> None:
        self._all = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Family]:
        """Collect the current values."""
        return [family for family in self._all.collect() if family.name in _OF_PROCESS]


@dataclass(slots=True)
class Metrics:
    """Metrics, each created on first use; `forget` removes the series of a finished job.

    A label value that `VALUES` does not allow is exported as `other`.
    """

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _by_name: dict[str, Counter | Gauge | Histogram] = field(
        default_factory=dict[str, Counter | Gauge | Histogram]
    )
    _children: dict[str, dict[Values, object]] = field(
        default_factory=dict[str, dict[Values, object]]
    )
    _cached: dict[tuple[object, ...], object] = field(
        default_factory=dict[tuple[object, ...], object]
    )
    _totals: dict[tuple[str, Values], float] = field(
        default_factory=dict[tuple[str, Values], float]
    )

    def watch_process(self) -> None:
        """Export CPU time, memory and open files of this process."""
        self.registry.register(_Process())

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increment a counter."""
        self._child(name, Counter, labels).inc(amount)

    def total(self, name: str, value: float, **labels: str) -> None:
        """Set a counter to an external total; a total that decreased counts as reset."""
        child = self._child(name, Counter, labels)
        key = (name, self._values(name, labels))
        before = self._totals.get(key, 0.0)
        if value < before:
            child.reset()
            before = 0.0
        child.inc(value - before)
        self._totals[key] = value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._child(name, Gauge, labels).set(value)

    def follow(self, name: str, value: Callable[[], float], **labels: str) -> None:
        """Make a gauge call `value` from another thread at each scrape."""
        self._child(name, Gauge, labels).set_function(value)

    def observe(self, name: str, values: float | Iterable[float], **labels: str) -> None:
        """Add values to a histogram."""
        child = self._child(name, Histogram, labels)
        for value in [values] if isinstance(values, (int, float)) else values:
            child.observe(value)

    def drop(self, name: str, **labels: str) -> None:
        """Remove one series."""
        self._remove(name, self._values(name, labels))

    def forget(self, job: str) -> None:
        """Remove all series of a job."""
        for name, children in self._children.items():
            names = NAMES[name].labels
            if "job" in names:
                at = names.index("job")
                for values in [child for child in children if child[at] == job]:
                    self._remove(name, values)

    @property
    def num_children(self) -> int:
        """Number of distinct label sets."""
        return sum(map(len, self._children.values()))

    def _remove(self, name: str, values: Values) -> None:
        self._cached.clear()  # for all metrics; it refills quickly
        if self._children.get(name, {}).pop(values, None) is not None:
            if values:
                self._by_name[name].remove(*values)
            else:
                self.registry.unregister(self._by_name.pop(name))
        self._totals.pop((name, values), None)

    def _child(self, name: str, cls: type[Metric], labels: dict[str, str]) -> Metric:
        key = (name, *labels.items())
        child = self._cached.get(key)
        if child is None:
            values = self._values(name, labels)
            child = self._look_up(name, cls, values)
            if OTHER not in values:  # the values behind `other` are unbounded
                self._cached[key] = child
        if not isinstance(child, cls):
            raise TypeError(f"{name} is a {type(child).__name__}, not a {cls.__name__}")
        return child

    def _look_up(self, name: str, cls: type[Metric], values: Values) -> object:
        children = self._children.setdefault(name, {})
        child = children.get(values)
        if child is None:
            metric = self._get(name, cls)
            child = children[values] = metric.labels(*values) if values else metric
        return child

    def _get(self, name: str, cls: type[Metric]) -> Counter | Gauge | Histogram:
        spec = NAMES[name]
        if _CLASSES[spec.kind] is not cls:
            raise TypeError(f"{name} is a {spec.kind}, not a {cls.__name__.lower()}")
        if name not in self._by_name:
            options: dict[str, Any] = {"buckets": spec.buckets} if spec.buckets else {}
            self._by_name[name] = cls(
                spec.name, spec.text, spec.labels, registry=self.registry, **options
            )
        return self._by_name[name]

    def _values(self, name: str, labels: dict[str, str]) -> Values:
        names = NAMES[name].labels
        if labels.keys() != set(names):
            raise ValueError(f"{name}: labels {sorted(labels)}; expected {sorted(names)}")
        values = tuple(labels[label] for label in names)
        if values in self._children.get(name, {}):
            return values
        return tuple(self._bounded(name, at, values) for at in range(len(values)))

    def _bounded(self, name: str, at: int, values: Values) -> str:
        """The value of a label, or `other` if `VALUES` does not allow it."""
        names = NAMES[name].labels
        allowed, value = VALUES.get(names[at], ()), values[at]
        if names[at] == "job" or value == OTHER:
            return value
        if isinstance(allowed, tuple):
            return value if value in allowed else OTHER
        job = values[names.index("job")] if "job" in names else ""
        children = self._children.get(name, {})
        of_job = [child for child in children if not job or child[names.index("job")] == job]
        seen = {child[at] for child in of_job}
        return value if value in seen or len(seen - {OTHER}) < allowed else OTHER


class GaugeSet:
    """Gauges that are updated together; those missing from an update are removed."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._shown: set[Series] = set()

    def show(self, values: Mapping[Series, float]) -> None:
        """Set all gauges; `series` makes the keys."""
        for (name, labels), value in values.items():
            self._metrics.set(name, value, **dict(labels))
        self._keep(set(values))

    def clear(self) -> None:
        """Remove all, so that stale values do not look current."""
        self._keep(set())

    def _keep(self, kept: set[Series]) -> None:
        for name, labels in self._shown - kept:
            self._metrics.drop(name, **dict(labels))
        self._shown = kept


def series(name: str, **labels: str) -> Series:
    """The key of a metric with one set of labels."""
    return name, tuple(labels.items())
