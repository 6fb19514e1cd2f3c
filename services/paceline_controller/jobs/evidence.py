"""Evidence about a running job from roster and ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.enums import JobState, WorkerKind
from paceline.types import Worker, WorkerPhase
from paceline_controller.demand_source import JobDemand
from paceline_controller.jobs.plan import LiveJob

# Load of workers that grows only with work done. Loading weights is none: they may be
# refused.
_WORK = ("tokens_generated", "tokens")


@dataclass(frozen=True, slots=True)
class Evidence:
    """State of a running job at one moment."""

    demand: JobDemand
    trainers: tuple[Worker, ...] = ()
    rollouts: tuple[Worker, ...] = ()
    environments: tuple[Worker, ...] = ()  # of all jobs
    waiting: Mapping[str, float] = field(default_factory=dict[str, float])  # episodes, by stage
    evaluating: tuple[tuple[str, WorkerPhase], ...] = ()  # stages of its evaluation, by worker
    running: bool = True  # False: it starts
    step_s: float = 0.0  # that its world and its rewards may take at most
    score_s: float = 0.0
    load_s: float = 0.0
    outside: bool = False  # an endpoint answers: it has neither trainer nor rollout workers
    refused: str = ""  # what that endpoint has said last

    @property
    def own(self) -> tuple[Worker, ...]:
        """The workers that are its alone."""
        return (*self.trainers, *self.rollouts)

    @property
    def batches(self) -> tuple[int, ...]:
        """Moves with steps and with groups that will be trained."""
        return (self.demand.step, self.demand.accepted_groups)

    @property
    def episodes(self) -> tuple[int, ...]:
        """Moves with episodes that end well, evaluations included."""
        demand = self.demand
        return (*self.batches, demand.sampled_tokens, demand.measuring, demand.eval_open)

    @property
    def work(self) -> tuple[object, ...]:
        """Moves with the work of its trainer and rollout workers, also if nothing comes of it."""
        return tuple(
            (worker.worker_id, worker.pid, worker.active_version, _work_of(worker))
            for worker in sorted(self.own, key=lambda worker: worker.worker_id)
        )

    @property
    def evaluation(self) -> tuple[object, ...]:
        """Moves with its evaluation alone, also with tokens of its episodes."""
        demand = self.demand
        return (demand.eval_version, demand.eval_tasks, demand.eval_open, self.evaluating)

    @property
    def waits(self) -> bool:
        """Whether the trainer waits for its batch, or an evaluation for its episodes."""
        return self.demand.trainer_wait_s > 0 or self.demand.measuring

    @property
    def leased(self) -> bool:
        """Whether environments have episodes of it, or may have some of its evaluation."""
        return bool(self.demand.leased or self.demand.eval_open)


def evidence_of(job: LiveJob, workers: Iterable[Worker], demand: JobDemand) -> Evidence:
    """The evidence about a job in the roster and the ledger."""
    by_kind: dict[WorkerKind, list[Worker]] = {}
    for worker in workers:
        if worker.job_id in ("", job.job_id):
            by_kind.setdefault(worker.kind, []).append(worker)
    environments = tuple(by_kind.get(WorkerKind.ENVIRONMENT, ()))
    waiting: Counter[str] = Counter()
    refused = ""
    evaluating: list[tuple[str, WorkerPhase]] = []
    for worker, phase in ((member, phase) for member in environments for phase in member.phases):
        if phase.job_id == job.job_id:
            waiting[phase.name] += int(phase.total - phase.done)
            refused = refused or phase.detail
            if phase.number >= 0:
                evaluating.append((worker.worker_id, phase))
    return Evidence(
        demand=demand,
        trainers=tuple(by_kind.get(WorkerKind.TRAINER, ())),
        rollouts=tuple(by_kind.get(WorkerKind.ROLLOUT, ())),
        environments=environments,
        waiting=waiting,
        evaluating=tuple(evaluating),
        running=job.state is JobState.RUNNING,
        step_s=job.spec.tasks.step_timeout_s,
        score_s=max(part.timeout_s for part in job.spec.reward),
        load_s=job.spec.tasks.load_timeout_s,
        outside=job.spec.model.endpoint is not None,
        refused=refused,
    )


def _work_of(worker: Worker) -> tuple[float, ...]:
    return tuple(worker.load.get(name, 0.0) for name in _WORK)
