"""Accelerator time of jobs, and its cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from paceline.config.service import ControllerOptions
from paceline.enums import WorkerKind
from paceline.platform.telemetry.metrics import Metrics
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.plan import Wanted

HOUR_S = 3600.0
TRAINER = "trainer"  # the pool of trainer ranks


class Costs:
    """Accelerator seconds of rollout workers and trainer ranks, and their cost, by job and pool."""

    def __init__(self, metrics: Metrics, options: ControllerOptions) -> None:
        self._metrics = metrics
        self._options = options
        self._last_s: float | None = None
        self._jobs: set[str] = set()
        for kind in WorkerKind:  # from 0, or `rate` would miss the first event
            metrics.add("restarts", 0, service=kind)

    def account(
        self,
        observed: Iterable[Observed],
        wanted: Mapping[str, Wanted],
        *,
        jobs: Collection[str],
        now_s: float,
    ) -> None:
        """Account for the time since the last call by what runs now; forget jobs that are over."""
        passed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        for process in observed:
            what = wanted.get(process.name)
            if process.alive and not process.pending and what is not None and what.job_id in jobs:
                self._add(process, what, passed_s)
        for job_id in self._jobs - set(jobs):
            self._metrics.forget(job_id)
        self._jobs = set(jobs)

    def close(self) -> None:
        """Remove the metrics: another leader accounts from here on."""
        for job_id in self._jobs:
            self._metrics.forget(job_id)
        self._jobs = set()

    def restarted(self, kind: WorkerKind) -> None:
        """Count a process that has died."""
        self._metrics.add("restarts", service=kind)

    def _add(self, process: Observed, what: Wanted, passed_s: float) -> None:
        if what.kind is WorkerKind.TRAINER:
            pool, count, cost = TRAINER, what.world_size, self._options.trainer_cost
        elif what.kind is WorkerKind.ROLLOUT:
            pool, count, cost = what.pool, process.replicas, self._options.pools[what.pool].cost
        else:
            return  # a shared pool, on machines without accelerators
        seconds = count * passed_s
        self._metrics.add("accelerator_seconds", seconds, job=what.job_id, pool=pool)
        self._metrics.add("cost", seconds * cost / HOUR_S, job=what.job_id, pool=pool)
