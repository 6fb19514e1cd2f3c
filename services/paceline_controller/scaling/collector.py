"""Collects signals from the experience service: the roster, and the demand of each job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.config.service import ControllerOptions
from paceline.enums import WorkerKind
from paceline.types import Worker
from paceline_controller.demand_source import JobDemand
from paceline_controller.jobs.plan import LiveJob, pools_of
from paceline_controller.scaling.signals import (
    EnvironmentSignals,
    JobSignals,
    PoolSignals,
    RewardSignals,
    Signals,
)

_WORK = ("step_s", "publish_s", "checkpoint_s")  # of a trainer


@dataclass(slots=True)
class Counters:
    """Increases of counters since the last collection, by owner and name."""

    _before: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    _now: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def grown(self, owner: str, name: str, value: float) -> float:
        """Increase of a counter: 0 when first seen; one that fell was reset and counts from 0."""
        before = self._swap(owner, name, value)
        return value - before if value >= before else value

    def advanced(self, owner: str, name: str, value: float) -> float:
        """Increase of a value that may go back, such as the step of a restarted trainer."""
        return max(0.0, value - self._swap(owner, name, value))

    def turn(self) -> None:
        """End a collection; counters that were not read in it are forgotten."""
        self._before, self._now = self._now, {}

    def _swap(self, owner: str, name: str, value: float) -> float:
        self._now[owner, name] = value
        return self._before.get((owner, name), value)


class Collector:
    """Computes signals; remembers counters, and since when workers have been ready."""

    def __init__(self, options: ControllerOptions) -> None:
        self._options = options
        self._counters = Counters()
        self._since: dict[tuple[str, int], float] = {}
        self._collected_s: float | None = None

    def collect(
        self,
        *,
        jobs: Iterable[LiveJob],
        workers: Sequence[Worker],
        demand: Mapping[str, JobDemand],
        now_s: float,
    ) -> Signals:
        """All signals at this moment; counts are those since the last collection."""
        seconds = 0.0 if self._collected_s is None else now_s - self._collected_s
        self._collected_s = now_s
        self._note_ready(workers, now_s)
        signals = Signals(
            seconds=seconds,
            jobs=tuple(
                self._job(
                    job,
                    workers,
                    demand.get(job.job_id, JobDemand()),
                    seconds=seconds,
                    now_s=now_s,
                )
                for job in jobs
            ),
            environment=self._environment(workers, seconds),
            reward=self._reward(workers),
        )
        self._counters.turn()
        return signals

    def _note_ready(self, workers: Iterable[Worker], now_s: float) -> None:
        ready = {(w.worker_id, w.pid) for w in workers if w.active_version >= 0}
        self._since = {key: self._since.get(key, now_s) for key in ready}

    def _job(
        self,
        job: LiveJob,
        workers: Sequence[Worker],
        wants: JobDemand,
        *,
        seconds: float,
        now_s: float,
    ) -> JobSignals:
        mine = [worker for worker in workers if worker.job_id == job.job_id]
        trainers = [worker for worker in mine if worker.kind is WorkerKind.TRAINER]
        rollouts = [worker for worker in mine if worker.kind is WorkerKind.ROLLOUT]
        grown = self._counters.grown
        return JobSignals(
            job_id=job.job_id,
            spec=job.spec,
            step=wants.step,
            steps=self._counters.advanced(job.job_id, "step", wants.step),
            step_s=sum(grown(t.worker_id, n, t.load.get(n, 0.0)) for t in trainers for n in _WORK),
            wait_s=sum(grown(t.worker_id, "wait_s", t.load.get("wait_s", 0.0)) for t in trainers),
            groups=self._counters.advanced(job.job_id, "groups", wants.accepted_groups),
            tokens=self._counters.advanced(job.job_id, "tokens", wants.sampled_tokens),
            open_episodes=wants.queued + wants.leased,
            headroom_groups=wants.headroom_groups,
            mean_group=wants.group_size,
            published=self._published(job.job_id, _newest(trainers)),
            spreading_s=seconds if _behind(trainers, rollouts) else 0.0,
            measuring=wants.measuring,
            pools=self._pools(job, rollouts, now_s),
        )

    def _published(self, job_id: str, newest: int) -> float:
        """Versions by job; a restarted trainer that reports none yet does not lower them."""
        return self._counters.advanced(job_id, "version", newest) if newest >= 0 else 0.0

    def _pools(
        self, job: LiveJob, rollouts: Sequence[Worker], now_s: float
    ) -> dict[str, PoolSignals]:
        names = pools_of(job.spec, self._options)
        members: dict[str, list[Worker]] = {name: [] for name in names}
        for worker in rollouts:
            members.get(worker.pool or names[0], []).append(worker)
        return {name: self._pool(group, now_s) for name, group in members.items()}

    def _pool(self, workers: Sequence[Worker], now_s: float) -> PoolSignals:
        ready = [w for w in workers if w.active_version >= 0]
        warm = [
            w
            for w in ready
            if now_s - self._since[w.worker_id, w.pid] >= self._options.scaling.warmup_s
        ]
        waiting = sum(w.load.get("running", 0.0) + w.load.get("waiting", 0.0) for w in ready)
        busy_s = self._sum(warm, "busy_s")
        return PoolSignals(
            ready=len(ready),
            open_requests=waiting,
            warm=len(warm),
            requests=self._requests(warm, busy_s),
            tokens=self._sum(warm, "tokens_generated"),
            busy_s=busy_s,
            idle_s=self._sum(warm, "idle_s"),
        )

    def _requests(self, workers: Sequence[Worker], busy_s: float) -> float:
        """Mean concurrent requests per worker while busy; the current number would be too noisy."""
        request_s = self._sum(workers, "request_s")
        most = max((w.load.get("max_running", math.inf) for w in workers), default=0.0)
        return min(max(1.0, request_s / busy_s), most) if busy_s > 0 and request_s > 0 else 0.0

    def _sum(self, workers: Iterable[Worker], name: str) -> float:
        return sum(
            self._counters.grown(worker.worker_id, name, worker.load.get(name, 0.0))
            for worker in workers
        )

    def _environment(self, workers: Iterable[Worker], seconds: float) -> EnvironmentSignals:
        environments = [worker for worker in workers if worker.kind is WorkerKind.ENVIRONMENT]
        if not environments:
            return EnvironmentSignals()
        cpu_s = self._sum(environments, "cpu_s")
        return EnvironmentSignals(
            ready=len(environments),
            slots=sum(worker.load.get("slots", 0.0) for worker in environments) / len(environments),
            cpu_share=cpu_s / seconds if seconds > 0 else 0.0,
        )

    def _reward(self, workers: Sequence[Worker]) -> RewardSignals:
        rewards = [worker for worker in workers if worker.kind is WorkerKind.REWARD]
        callers = [worker for worker in workers if worker.kind is WorkerKind.ENVIRONMENT]
        inside = sum(worker.load.get("pending", 0.0) for worker in rewards)
        asking = sum(worker.load.get("waiting_score", 0.0) for worker in callers)
        return RewardSignals(
            ready=len(rewards),
            pending=max(inside, asking),  # callers queue while there is no worker
            busy_s=self._sum(rewards, "busy_s"),
            scored=self._sum(rewards, "scored"),
        )


def _newest(trainers: Iterable[Worker]) -> int:
    return max((worker.active_version for worker in trainers), default=-1)


def _behind(trainers: Iterable[Worker], rollouts: Iterable[Worker]) -> bool:
    """Whether most rollout workers do not have the newest weights yet."""
    newest = _newest(trainers)
    ready = [worker for worker in rollouts if worker.active_version >= 0]
    late = sum(worker.active_version < newest for worker in ready)
    return late > len(ready) / 2
