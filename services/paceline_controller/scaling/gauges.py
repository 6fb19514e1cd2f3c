"""What scaling sees and decides, as metrics; other autoscalers can follow them."""

from __future__ import annotations

from paceline.metrics import Metrics
from paceline.types import WorkerKind
from paceline_controller.plan import rollout_name
from paceline_controller.scaling.decide import Decision
from paceline_controller.scaling.signals import JobSignals, Signals

Series = tuple[str, tuple[tuple[str, str], ...]]


class Gauges:
    """Set at every look; those of jobs that are over disappear."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._shown: set[Series] = set()

    def show(self, signals: Signals, decision: Decision) -> None:
        """Everything of one look."""
        values = _shared(signals, decision)
        for job in signals.jobs:
            values |= _job(job, decision)
        for (name, labels), value in values.items():
            self._metrics.set(name, value, **dict(labels))
        for name, labels in self._shown - values.keys():
            self._metrics.drop(name, **dict(labels))
        self._shown = set(values)

    def clear(self) -> None:
        """Forget all: whoever reads them takes an old figure for a present one."""
        for name, labels in self._shown:
            self._metrics.drop(name, **dict(labels))
        self._shown = set()


def _series(name: str, **labels: str) -> Series:
    return name, tuple(labels.items())


def _shared(signals: Signals, decision: Decision) -> dict[Series, float]:
    ready = {
        WorkerKind.ENVIRONMENT: signals.environment.ready,
        WorkerKind.REWARD: signals.reward.ready,
    }
    values: dict[Series, float] = {
        _series("pending_scores", workload=str(WorkerKind.REWARD)): signals.reward.pending
    }
    for kind, count in ready.items():
        labels = {"workload": str(kind), "job": "", "pool": ""}
        values[_series("ready_replicas", **labels)] = count
        if str(kind) in decision.sizes:
            values[_series("wanted_replicas", **labels)] = decision.sizes[str(kind)]
    return values


def _job(job: JobSignals, decision: Decision) -> dict[Series, float]:
    values = {_series("wanted_episodes", job=job.job_id): float(job.wanted_episodes)}
    for pool, seen in job.pools.items():
        labels = {"workload": str(WorkerKind.ROLLOUT), "job": job.job_id, "pool": pool}
        values[_series("ready_replicas", **labels)] = seen.ready
        wanted = decision.sizes.get(rollout_name(job.job_id, pool))
        if wanted is not None:
            values[_series("wanted_replicas", **labels)] = wanted
        if seen.busy_s > 0:
            rate = seen.tokens / seen.busy_s
            values[_series("worker_tokens", job=job.job_id, pool=pool)] = rate
    if job.job_id in decision.targets:
        waits = decision.memory.jobs[job.job_id].estimates.wait_share
        values[_series("trainer_wait_share", job=job.job_id)] = waits
        values[_series("needed_tokens", job=job.job_id)] = decision.targets[job.job_id].rate
    return values
