"""Notices jobs that do not get on, and tells who keeps them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.enums import JobState, Phase
from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import GaugeSet, Metrics, series
from paceline.types import Worker
from paceline_controller.demand_source import DemandSource, JobDemand
from paceline_controller.jobs.evidence import Evidence, evidence_of
from paceline_controller.jobs.phases import Standing, WorkerPhases
from paceline_controller.jobs.plan import SERVED, LiveJob

LOOK_EVERY_S = 2.0
# How long nothing may have moved, while the trainer waits for its batch or an evaluation is open.
ABSENT_S = 10.0
"""If a worker that has been there is missing, or takes no work."""
BUSY_S = 30.0
"""If episodes wait for what workers are busy with, or all attempts fail."""
LOADING_S = 120.0
"""If rollout workers have not served yet, do not take new weights, or nothing is admitted."""
TRAINING_S = 1800.0
"""If the trainer has its batch: a step is only seen at its end."""
FRUITLESS_S = 600.0
"""Without a batch, although episodes come in: filters drop them all."""
MAX_NAMED = 3
"""Workers in a reason."""
FEW_FAILURES = 16
"""Attempts that may fail in a row, as when a worker is lost with its episodes."""
STAGES = {
    Phase.ROOM: "rollout: episodes wait for room on a worker",  # which those in `generate` may do
    Phase.GENERATE: "rollout: episodes wait for tokens",
    Phase.REPEAT: "endpoint: it refuses requests or does not answer; they are repeated",
    Phase.SCORE: "reward: episodes wait for their scores",
    Phase.STEP: "environment: episodes are in a step of their world",
    Phase.LOAD: "environment: episodes wait until their job and its world are loaded",
    Phase.SUBMIT: "experience: episodes wait to be stored",
}
OUTSIDE = {
    Phase.ROOM: "endpoint: episodes wait for their turn (model.endpoint.concurrency)",
    Phase.GENERATE: "endpoint: episodes wait for its answers",
}
"""Instead of these, if an outside endpoint answers."""
log = Log("progress")


class Culprit(NamedTuple):
    """Who keeps a job that does not get on."""

    bound_s: float  # until then it may be as it should
    why: str
    detail: str = ""  # may change while `why` does not


@dataclass(slots=True)
class Watched:
    """A job since it was first seen running: when each has moved last."""

    seen: Evidence
    batch_s: float
    episode_s: float
    work_s: float
    eval_s: float
    filtered: int  # groups, when `batches` moved last
    failed: int  # attempts, when `episodes` moved last
    first_failed_s: float | None = None  # since then
    last_failed_s: float = 0.0
    phases: WorkerPhases = field(default_factory=WorkerPhases)
    served: bool = False  # a rollout worker has had weights
    reason: tuple[float, str, str] = (0.0, "", "")  # moment, why, and the words for both

    @property
    def failing(self) -> bool:
        """Whether attempts fail again and again, and no episode ends well."""
        many = self.seen.demand.failed_attempts - self.failed >= FEW_FAILURES
        first_s = self.first_failed_s
        return many and first_s is not None and self.last_failed_s - first_s >= ABSENT_S

    def quiet_s(self, now_s: float) -> float:
        """Seconds since it has got on, if its reason says so."""
        since_s, why, _ = self.reason
        return now_s - since_s if why else 0.0


class ProgressWatch:
    """Compares what is seen of each job with what was seen before.

    Queued and paused jobs do not count, and of starting ones only what the trainer is at: queue,
    start timeout and restarts have bounds and reasons of their own.
    """

    def __init__(
        self,
        *,
        source: DemandSource,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._clock = clock
        self._wall = wall
        self._gauges = GaugeSet(metrics)
        self._due_s = 0.0
        self._watched: dict[str, Watched] = {}

    def reason(self, job_id: str) -> str:
        """Since when a job has made no progress, and because of whom; empty: it gets on.

        Or which of its workers its trainer does not agree with.
        """
        watched = self._watched.get(job_id)
        return "" if watched is None else watched.reason[2] or watched.seen.demand.disagreement

    async def look(self, jobs: Iterable[LiveJob]) -> None:
        """Look at jobs that run or start again, if it is time."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_EVERY_S
        served = [job for job in jobs if job.state in SERVED]
        if not served:
            self.compare({})
            return
        try:
            workers, demand = await self._source.workers(), await self._source.demand()
        except PacelineError as error:
            log.warning("progress is not known", error=error)
            return
        evidence = {
            job.job_id: evidence_of(job, workers, demand.get(job.job_id, JobDemand()))
            for job in served
            if job.job_id in demand or job.state is JobState.STARTING
        }
        self.compare(evidence)

    def compare(self, evidence: Mapping[str, Evidence]) -> None:
        """Take note of what has moved, by job; others are forgotten."""
        now_s = self._clock()
        self._watched = {
            job_id: _advance(self._watched.get(job_id), seen, now_s)
            for job_id, seen in evidence.items()
        }
        for watched in self._watched.values():
            self._judge(watched, now_s)
        self._gauges.show(
            {
                series("no_progress", job=job_id): watched.quiet_s(now_s)
                for job_id, watched in self._watched.items()
            }
        )

    def close(self) -> None:
        """Clear the metrics: another controller looks at the jobs from here on."""
        self.compare({})

    def _judge(self, watched: Watched, now_s: float) -> None:
        seen = watched.seen
        # Work for attempts that all fail is none.
        failing = watched.failing
        since_s = watched.episode_s if failing else max(watched.episode_s, watched.work_s)
        cause = culprit(seen, watched.phases, failing=failing, served=watched.served)
        if now_s - since_s >= cause.bound_s:
            self._say(watched, "no progress", since_s, now_s, cause)
            return
        dropped = sum(seen.demand.filtered.values()) > watched.filtered
        if seen.demand.trainer_wait_s > 0 and dropped and now_s - watched.batch_s >= FRUITLESS_S:
            filters = Culprit(FRUITLESS_S, "filters drop every group", _most(seen.demand))
            self._say(watched, "no batch", watched.batch_s, now_s, filters)
            return
        if seen.demand.measuring:
            cause = culprit_of_evaluation(seen, watched.phases)
            if now_s - watched.eval_s >= cause.bound_s:
                self._say(watched, _evaluation(seen.demand), watched.eval_s, now_s, cause)
                return
        watched.reason = (0.0, "", "")

    def _say(
        self, watched: Watched, what: str, since_s: float, now_s: float, cause: Culprit
    ) -> None:
        """Set the reason; it stays the same while it holds, as every change is stored."""
        known_s, why, _ = watched.reason
        if (known_s, why) != (since_s, cause.why):
            words = f"{what} since {self._time(since_s, now_s)}: {cause.why}{cause.detail}"
            watched.reason = (since_s, cause.why, words)

    def _time(self, since_s: float, now_s: float) -> str:
        """A moment rather than a duration: the reason stays the same as time passes."""
        return time.strftime("%H:%M:%S UTC", time.gmtime(self._wall() - (now_s - since_s)))


def culprit(
    seen: Evidence, phases: WorkerPhases, *, failing: bool = False, served: bool = True
) -> Culprit:
    """Who keeps a job that does not get on; `served`: a rollout worker has had weights before."""
    demand = seen.demand
    if seen.outside:
        return _of_outside(seen, failing=failing)
    trainer = phases.standing(seen.trainers)
    if not seen.running:
        return _standing(trainer, math.inf, "trainer: it does not start training")
    if not seen.trainers:
        return Culprit(ABSENT_S, "trainer: none is in the roster")
    if not seen.waits:
        return _standing(trainer, TRAINING_S, f"trainer: it does not finish step {demand.step + 1}")
    if failing:
        return _failing(demand)
    cause = _rollout_culprit(seen, phases, served) or _environment_culprit(seen)
    return cause or _stage_culprit(seen)


def _of_outside(seen: Evidence, *, failing: bool) -> Culprit:
    """Who keeps a job whose episodes an outside endpoint answers."""
    if failing:
        return _failing(seen.demand)
    if not seen.waits:
        return Culprit(LOADING_S, "experience: no evaluation is open")
    return _environment_culprit(seen) or _stage_culprit(seen)


def _failing(demand: JobDemand) -> Culprit:
    return Culprit(BUSY_S, "every attempt of an episode fails: ", demand.last_failure)


def _standing(stands: Standing | None, bound_s: float, why: str) -> Culprit:
    """The culprit with the standing worker, its phase and limit; without one, with `bound_s`."""
    if stands is None:
        return Culprit(bound_s, why)
    return Culprit(stands.limit_s, why, f"; {stands.words}")


def _rollout_culprit(seen: Evidence, phases: WorkerPhases, served: bool) -> Culprit | None:
    """The problem of the rollout workers; None: they serve, or have episodes."""
    bound_s = ABSENT_S if served else LOADING_S
    if not seen.rollouts:
        return Culprit(bound_s, "rollout: no worker is in the roster")
    newest = max(worker.active_version for worker in seen.trainers)
    serving = [worker for worker in seen.rollouts if worker.active_version >= 0]
    if not serving and newest < 0:
        trainer = phases.standing(seen.trainers)
        return _standing(trainer, LOADING_S, "trainer: it has published no weights yet")
    if not serving:
        some = f"none of {len(seen.rollouts)} workers serves weights"
        why = f"rollout: {some} (the trainer has published version {newest})"
        return _standing(phases.standing(seen.rollouts), bound_s, why)
    late = [worker for worker in serving if worker.active_version < newest]
    # Episodes that need newer weights than all workers have wait for room on one of them.
    need_newer = len(late) == len(serving) and seen.waiting.get(Phase.ROOM)
    if late and (not seen.leased or need_newer):
        text = f"rollout: {len(late)} of {len(serving)} workers have not taken version {newest}"
        return _standing(phases.standing(late), LOADING_S, text)
    return None


def _environment_culprit(seen: Evidence) -> Culprit | None:
    """Why environments have no episodes; None: they have some."""
    if not seen.environments:
        return Culprit(ABSENT_S, "environment: no worker is in the roster")
    if seen.leased:
        return None
    if seen.demand.queued:
        slots = _sum(seen.environments, "slots")
        if 0 < slots <= _sum(seen.environments, "open"):
            return Culprit(BUSY_S, f"environment: other jobs have all of its {slots:g} slots")
        return Culprit(ABSENT_S, "environment: no worker takes the episodes that are queued")
    if seen.demand.headroom_groups:
        return Culprit(BUSY_S, "environment: no worker asks for tasks")
    what = "limits of the job, or own filters or advantages that take long"
    return Culprit(LOADING_S, f"experience: no episode is open and none is admitted ({what})")


def culprit_of_evaluation(seen: Evidence, phases: WorkerPhases) -> Culprit:
    """Who keeps an evaluation that does not get on, whatever the job does meanwhile."""
    version, waiting = seen.demand.eval_version, Counter[str]()
    for _, phase in seen.evaluating:
        waiting[phase.name] += int(phase.total - phase.done)
    if not waiting and not seen.environments:
        return Culprit(ABSENT_S, "environment: no worker is in the roster")
    if not waiting:
        return Culprit(LOADING_S, "environment: no worker has its episodes")
    needs_tokens = any(waiting[stage] for stage in (Phase.ROOM, Phase.GENERATE))
    if needs_tokens and all(worker.active_version != version for worker in seen.rollouts):
        why = f"rollout: no worker serves version {version}"
        return _standing(phases.standing(seen.rollouts), LOADING_S, why)
    return _stage_culprit(replace(seen, waiting=waiting))


def _evaluation(demand: JobDemand) -> str:
    left = f"{demand.eval_open} of {demand.eval_tasks} tasks are open"
    return f"no progress of the evaluation of version {demand.eval_version} ({left})"


def _stage_culprit(seen: Evidence) -> Culprit:
    """The stage that the episodes wait for."""
    bounds = {Phase.STEP: seen.step_s, Phase.SCORE: seen.score_s, Phase.LOAD: seen.load_s}
    stage = max(STAGES, key=lambda name: seen.waiting.get(name, 0.0))
    if seen.outside:  # most of its episodes wait until those have been answered
        asked = (Phase.REPEAT, Phase.GENERATE)
        stage = next((name for name in asked if seen.waiting.get(name)), stage)
    if not seen.waiting.get(stage):
        return Culprit(BUSY_S, "environment: episodes are leased, and no worker has them")
    if stage == Phase.REPEAT:
        return Culprit(ABSENT_S, STAGES[stage], f"; {seen.refused}")
    if seen.outside:
        why = OUTSIDE.get(stage, STAGES[stage])
        return Culprit(max(BUSY_S, bounds.get(stage, 0.0)), why)
    # The load of shared workers is not for those who read a job's reason.
    detail = _requests(seen.rollouts) if stage in (Phase.ROOM, Phase.GENERATE) else ""
    return Culprit(max(BUSY_S, bounds.get(stage, 0.0)), STAGES[stage], detail)


def _requests(workers: Iterable[Worker]) -> str:
    """The workers that have some: `; rollout-0 has 12 requests`."""
    counts = {worker.worker_id: worker.load.get("open", 0.0) for worker in workers}
    some = [f"{name} has {count:g} requests" for name, count in sorted(counts.items()) if count]
    return "; " + ", ".join(some[:MAX_NAMED]) if some else ""


def _sum(workers: Iterable[Worker], name: str) -> float:
    return sum(worker.load.get(name, 0.0) for worker in workers)


def _most(demand: JobDemand) -> str:
    most = max(demand.filtered, key=lambda name: demand.filtered[name])
    return f", most as {most} ({demand.filtered[most]} so far)"


def _advance(before: Watched | None, seen: Evidence, now_s: float) -> Watched:
    failed, filtered = seen.demand.failed_attempts, sum(seen.demand.filtered.values())
    serves = any(worker.active_version >= 0 for worker in seen.rollouts)
    if before is None or before.seen.running != seen.running:
        first = Watched(seen, now_s, now_s, now_s, now_s, filtered, failed, served=serves)
        first.phases.look(seen.own, now_s)
        return first
    after = replace(before, seen=seen, served=before.served or serves)
    moved = after.phases.look(seen.own, now_s)
    if moved or seen.work != before.seen.work:
        after.work_s = now_s
    if seen.evaluation != before.seen.evaluation:
        after.eval_s = now_s
    if seen.batches != before.seen.batches:
        after.batch_s, after.filtered = now_s, filtered
    if seen.episodes != before.seen.episodes or failed < before.failed:  # a ledger opened again
        after.episode_s, after.failed, after.first_failed_s = now_s, failed, None
    elif failed > before.seen.demand.failed_attempts:
        after.last_failed_s = now_s
        if after.first_failed_s is None:
            after.first_failed_s = now_s
    return after
