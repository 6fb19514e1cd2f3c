"""Signals and decisions of scaling as metrics, which external autoscalers can use."""

from __future__ import annotations

from paceline.enums import WorkerKind
from paceline.platform.telemetry.metrics import Series, series
from paceline_controller.jobs.plan import rollout_name
from paceline_controller.scaling.decide import Decision
from paceline_controller.scaling.signals import JobSignals, Signals


def values_of(signals: Signals, decision: Decision) -> dict[Series, float]:
    """All metrics of one decision; series of jobs that are over are omitted."""
    values = _shared(signals, decision)
    for job in signals.jobs:
        values |= _job(job, decision)
    return values


def _shared(signals: Signals, decision: Decision) -> dict[Series, float]:
    ready = {
        WorkerKind.ENVIRONMENT: signals.environment.ready,
        WorkerKind.REWARD: signals.reward.ready,
    }
    values: dict[Series, float] = {
        series("pending_scores", workload=str(WorkerKind.REWARD)): signals.reward.pending
    }
    for kind, count in ready.items():
        labels = {"workload": str(kind), "job": "", "pool": ""}
        values[series("ready_replicas", **labels)] = count
        if str(kind) in decision.sizes:
            values[series("wanted_replicas", **labels)] = decision.sizes[str(kind)]
    return values


def _job(job: JobSignals, decision: Decision) -> dict[Series, float]:
    values = {series("wanted_episodes", job=job.job_id): float(job.wanted_episodes)}
    for pool, seen in job.pools.items():
        labels = {"workload": str(WorkerKind.ROLLOUT), "job": job.job_id, "pool": pool}
        values[series("ready_replicas", **labels)] = seen.ready
        wanted = decision.sizes.get(rollout_name(job.job_id, pool))
        if wanted is not None:
            values[series("wanted_replicas", **labels)] = wanted
        if seen.busy_s > 0:
            rate = seen.tokens / seen.busy_s
            values[series("worker_tokens", job=job.job_id, pool=pool)] = rate
    if job.job_id in decision.targets:
        waits = decision.memory.jobs[job.job_id].estimates.wait_share
        values[series("trainer_wait_share", job=job.job_id)] = waits
        values[series("needed_tokens", job=job.job_id)] = decision.targets[job.job_id].rate
    return values
