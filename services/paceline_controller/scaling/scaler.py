"""Runs the scaling decision periodically, for the reconciler and the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.config.service import ControllerOptions
from paceline.enums import WorkerKind
from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import GaugeSet, Metrics
from paceline_controller.demand_source import DemandSource
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.plan import SERVED, LiveJob, pools_of, rollout_name
from paceline_controller.jobs.starting import running_replicas
from paceline_controller.scaling.collector import Collector
from paceline_controller.scaling.decide import Bounds, Decision, ScalingMemory, decide
from paceline_controller.scaling.gauges import values_of

log = Log("scaling")


class Scaler:
    """Sizes of scaled workloads, from `decide` or as set by an external autoscaler."""

    def __init__(
        self,
        *,
        source: DemandSource,
        options: ControllerOptions,
        metrics: Metrics,
    ) -> None:
        self._source = source
        self._options = options
        self._collector = Collector(options)
        self._gauges = GaugeSet(metrics)
        self._memory = ScalingMemory()
        self._sizes: dict[str, int] = {}
        self._due_s = 0.0
        self._seen: set[str] = set()

    async def sizes(
        self,
        jobs: Iterable[LiveJob],
        observed: Iterable[Observed],
        *,
        bounds: Bounds,
        now_s: float,
    ) -> dict[str, int]:
        """Replicas by workload; all others have a fixed number."""
        served = [job for job in jobs if job.state in SERVED]
        running = running_replicas(observed)
        self._sizes = self._known(served, running)
        groups = self._scaled_workloads(served)
        scaled = [name for group in groups for name in group]
        new = [group[0] for group in groups if group[0] not in self._sizes]
        if scaled and (now_s >= self._due_s or set(new) - self._seen):
            self._due_s = now_s + self._options.scaling.period_s
            await self._decide(served, bounds, now_s)
        self._seen = set(scaled)
        if self._options.scaling.executor == "external":
            # At least 1 for those of jobs: a workload of size 0 would be deleted.
            jobs_own = {name for name in scaled if name.startswith("rollout-")}
            return {n: max(running[n], n in jobs_own) for n in scaled if n in running}
        # Without signals a job starts with one worker: there may be no capacity for more.
        return {name: 1 for name in new if name.startswith("rollout-")} | self._sizes

    def close(self) -> None:
        """Clear the metrics: another controller decides from here on."""
        self._gauges.clear()

    def _known(self, jobs: Iterable[LiveJob], running: Mapping[str, int]) -> dict[str, int]:
        """Sizes as decided; after a restart of this process, as observed."""
        replicas: dict[str, int] = {}
        for group in self._scaled_workloads(jobs):
            before = self._sizes if any(name in self._sizes for name in group) else running
            if any(name in before for name in group):
                replicas |= {name: before.get(name, 0) for name in group}
        return replicas

    def _scaled_workloads(self, jobs: Iterable[LiveJob]) -> list[list[str]]:
        """Names of workloads that are scaled; those of a job's pools belong together."""
        scaling = self._options.scaling
        rollouts = [
            [rollout_name(job.job_id, pool) for pool in pools_of(job.spec, self._options)]
            for job in jobs
            if job.spec.rollout.scaling is not None
        ]
        environment = [[str(WorkerKind.ENVIRONMENT)]] if scaling.environment else []
        reward = [[str(WorkerKind.REWARD)]] if scaling.reward else []
        return [*rollouts, *environment, *reward]

    async def _decide(self, jobs: Sequence[LiveJob], bounds: Bounds, now_s: float) -> None:
        try:
            workers, demand = await self._source.workers(), await self._source.demand()
        except PacelineError as error:
            log.warning("no signals; sizes stay as they are", error=error)
            return
        signals = self._collector.collect(jobs=jobs, workers=workers, demand=demand, now_s=now_s)
        decision = decide(
            signals,
            self._sizes,
            options=self._options,
            memory=self._memory,
            bounds=bounds,
            now_s=now_s,
        )
        self._tell(decision)
        self._memory, self._sizes = decision.memory, dict(decision.sizes)
        self._gauges.show(values_of(signals, decision))

    def _tell(self, decision: Decision) -> None:
        for name, size in decision.sizes.items():
            before = self._sizes.get(name, 0)
            if size != before:
                log.info(
                    "scales",
                    workload=name,
                    replicas=size,
                    before=before,
                    why=decision.reasons[name],
                )
