"""Notices jobs that do not get on, and tells who keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.enums import JobState, WorkerKind
from paceline.errors import PacelineError
from paceline.telemetry.logs import Log
from paceline.types import Worker
from paceline.v1.experience_pb2 import JobDemand
from paceline_controller.jobs.plan import LiveJob

LOOK_EVERY_S = 2.0
# How long nothing may have moved, while the trainer waits for its batch or an evaluation is open.
ABSENT_S = 10.0
"""If a worker is missing, serves no weights or takes no work."""
BUSY_S = 30.0
"""If episodes wait for what workers are busy with."""
TRAINING_S = 900.0
"""If the trainer has its batch: a step is only seen at its end."""
FRUITLESS_S = 600.0
"""Without a batch, although episodes come in: filters drop them all."""
# Of the load of workers: what grows only with work done. Loading weights is none: they may be
# refused.
_WORK = ("tokens_generated", "step_s", "publish_s", "checkpoint_s", "tokens")
_STAGES = {
    "generate": "rollout: {:.0f} episodes wait for tokens",
    "room": "rollout: {:.0f} episodes wait for room on a worker",
    "score": "reward: {:.0f} episodes wait for their scores",
    "step": "environment: {:.0f} episodes are in a step of their world",
    "submit": "experience: {:.0f} episodes wait to be stored",
}
log = Log("progress")


class Figures(Protocol):
    """Where workers and demand are read from: the experience service."""

    async def workers(self) -> Sequence[Worker]:
        """All workers in the roster."""
        ...

    async def demand(self) -> Mapping[str, JobDemand]:
        """Demand of each live job."""
        ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """What can be seen of a running job at one moment."""

    demand: JobDemand
    trainers: tuple[Worker, ...] = ()
    rollouts: tuple[Worker, ...] = ()
    environments: tuple[Worker, ...] = ()  # of all jobs
    step_timeout_s: float = 0.0

    @property
    def batches(self) -> tuple[int, ...]:
        """Moves with steps and with groups that will be trained."""
        return (self.demand.step, self.demand.accepted_groups)

    @property
    def episodes(self) -> tuple[int, ...]:
        """Moves with episodes that end well, evaluations included."""
        return (*self.batches, self.demand.sampled_tokens, self.demand.measuring)

    @property
    def work(self) -> tuple[object, ...]:
        """Moves with the work of its trainer and rollout workers, also if nothing comes of it."""
        own = sorted((*self.trainers, *self.rollouts), key=lambda worker: worker.worker_id)
        return tuple(
            (worker.worker_id, worker.pid, worker.active_version, _work_of(worker))
            for worker in own
        )

    @property
    def waits(self) -> bool:
        """Whether the trainer waits for its batch, or an evaluation for its episodes."""
        return self.demand.trainer_wait_s > 0 or self.demand.measuring


@dataclass(slots=True)
class _Watched:
    seen: Evidence
    batch_s: float  # when each has moved last
    episode_s: float
    work_s: float
    failed: int  # attempts that had failed when an episode ended well


class ProgressWatch:
    """Compares what is seen of each running job with what was seen before.

    Queued, starting and paused jobs do not count: queue, start timeout and restarts have bounds and
    reasons of their own.
    """

    def __init__(
        self,
        *,
        source: Figures,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._clock = clock
        self._wall = wall
        self._due_s = 0.0
        self._watched: dict[str, _Watched] = {}
        self._reasons: dict[str, str] = {}

    def reason(self, job_id: str) -> str:
        """Since when a job has made no progress, and because of whom; empty: it gets on."""
        return self._reasons.get(job_id, "")

    async def look(self, jobs: Iterable[LiveJob]) -> None:
        """Look at running jobs again, if it is time."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_EVERY_S
        running = [job for job in jobs if job.state is JobState.RUNNING]
        if not running:
            self._watched, self._reasons = {}, {}
            return
        try:
            workers, demand = await self._source.workers(), await self._source.demand()
        except PacelineError as error:
            log.warning("progress is not known", error=error)
            return
        evidence = {
            job.job_id: evidence_of(job, workers, demand[job.job_id])
            for job in running
            if job.job_id in demand
        }
        self.compare(evidence)

    def compare(self, evidence: Mapping[str, Evidence]) -> None:
        """Take note of what has moved, by job; others are forgotten."""
        now_s = self._clock()
        self._watched = {
            job_id: _moved(self._watched.get(job_id), seen, now_s)
            for job_id, seen in evidence.items()
        }
        self._reasons = {
            job_id: reason
            for job_id, watched in self._watched.items()
            if (reason := self._reason(watched, now_s))
        }

    def _reason(self, watched: _Watched, now_s: float) -> str:
        seen = watched.seen
        failing = seen.demand.failed_attempts > watched.failed
        # Work for attempts that all fail is none.
        since_s = watched.episode_s if failing else max(watched.episode_s, watched.work_s)
        bound_s, who = culprit(seen, failing=failing)
        if now_s - since_s >= bound_s:
            return f"no progress since {self._time(since_s, now_s)}: {who}"
        if seen.waits and seen.demand.filtered and now_s - watched.batch_s >= FRUITLESS_S:
            return f"no batch since {self._time(watched.batch_s, now_s)}: {_dropped(seen.demand)}"
        return ""

    def _time(self, since_s: float, now_s: float) -> str:
        """A moment rather than a duration: the reason stays the same as time passes."""
        return time.strftime("%H:%M:%S UTC", time.gmtime(self._wall() - (now_s - since_s)))


def _work_of(worker: Worker) -> tuple[float, ...]:
    return tuple(worker.load.get(name, 0.0) for name in _WORK)


def evidence_of(job: LiveJob, workers: Iterable[Worker], demand: JobDemand) -> Evidence:
    """What the roster and the ledger say about a job."""
    by_kind: dict[WorkerKind, list[Worker]] = {}
    for worker in workers:
        if worker.job_id in ("", job.job_id):
            by_kind.setdefault(worker.kind, []).append(worker)
    return Evidence(
        demand=demand,
        trainers=tuple(by_kind.get(WorkerKind.TRAINER, ())),
        rollouts=tuple(by_kind.get(WorkerKind.ROLLOUT, ())),
        environments=tuple(by_kind.get(WorkerKind.ENVIRONMENT, ())),
        step_timeout_s=job.spec.tasks.step_timeout_s,
    )


def culprit(seen: Evidence, *, failing: bool = False) -> tuple[float, str]:
    """Who keeps a job that does not get on, and why; before that, how many seconds it may take."""
    demand = seen.demand
    if not seen.trainers:
        return ABSENT_S, "trainer: none is in the roster"
    if not seen.waits:
        return TRAINING_S, f"trainer: it has its batch and does not finish step {demand.step + 1}"
    if failing:
        return ABSENT_S, f"every attempt of an episode fails: {demand.last_failure}"
    if absent := _absent(seen):
        return ABSENT_S, absent
    waiting = {
        stage: sum(worker.load.get(f"waiting_{stage}", 0.0) for worker in seen.environments)
        for stage in _STAGES
    }
    stage = max(waiting, key=lambda name: waiting[name])
    if not waiting[stage]:
        return BUSY_S, f"environment: {demand.leased} leased episodes, and no worker has them"
    bound_s = max(BUSY_S, seen.step_timeout_s) if stage == "step" else BUSY_S
    return bound_s, _STAGES[stage].format(waiting[stage])


def _absent(seen: Evidence) -> str:
    """Which worker is missing, serves no weights or takes no work; empty: none."""
    demand = seen.demand
    if not seen.rollouts:
        return "rollout: no worker is in the roster"
    newest = max(worker.active_version for worker in seen.trainers)
    best = max(worker.active_version for worker in seen.rollouts)
    if best < 0:
        some = f"none of {len(seen.rollouts)} workers serves weights"
        return f"rollout: {some} (the trainer has published version {newest})"
    if not seen.environments:
        return "environment: no worker is in the roster"
    if demand.leased:
        return ""
    if best < newest and not demand.headroom_groups:
        return f"rollout: no worker has taken version {newest}; the newest served is {best}"
    if demand.queued:
        return f"environment: no worker takes the {demand.queued} episodes that are queued"
    if demand.headroom_groups:
        return "environment: no worker asks for tasks"
    return "experience: nothing is open and nothing may be admitted (limits of the job)"


def _dropped(demand: JobDemand) -> str:
    most = max(demand.filtered, key=lambda name: demand.filtered[name])
    return f"filters drop every group, most as {most} ({demand.filtered[most]} so far)"


def _moved(before: _Watched | None, seen: Evidence, now_s: float) -> _Watched:
    if before is None:
        return _Watched(seen, now_s, now_s, now_s, seen.demand.failed_attempts)
    ended_well = seen.episodes != before.seen.episodes
    # A ledger that was opened again counts from zero.
    failed = min(before.failed, seen.demand.failed_attempts)
    return _Watched(
        seen,
        now_s if seen.batches != before.seen.batches else before.batch_s,
        now_s if ended_well else before.episode_s,
        now_s if seen.work != before.seen.work else before.work_s,
        seen.demand.failed_attempts if ended_well else failed,
    )
