"""Computes the wanted workloads from jobs and options. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from paceline.config.job import JobSpec
from paceline.config.service import ControllerOptions, PoolOptions
from paceline.enums import JobState, WorkerKind
from paceline.front.local.devices.demand import rollout_gpus
from paceline.front.local.devices.device import Device

DEFAULT_POOL = "default"
# Queued and paused jobs hold no accelerators; cancelling ones are being taken down.
SERVED = frozenset({JobState.STARTING, JobState.RUNNING})


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A job that is not over, as the controller sees it."""

    job_id: str
    state: JobState
    step: int
    spec: JobSpec
    age_s: float = 0.0  # since it was submitted
    reason: str = ""  # why it is in its state


@dataclass(frozen=True, slots=True)
class Wanted:
    """A workload that should run: a shared pool, a job's trainer, its rollout workers in a pool."""

    name: str
    kind: WorkerKind
    job_id: str = ""  # empty: shared by all jobs
    pool: str = ""
    world_size: int = 1
    replicas: int = 1
    devices: tuple[Device, ...] | None = None
    """GPUs that it sees; None: those that its environment names."""
    memory_share: float | None = None
    """Of the memory of GPUs that it shares with the trainer."""
    accelerators: int | None = None
    """In a cluster: of each trainer rank, or of each rollout worker; None: as the chart says."""
    queue: str = ""
    """In a cluster: the queue of Kueue that admits it; empty: none."""


def plan(
    jobs: Iterable[LiveJob],
    options: ControllerOptions,
    sizes: Mapping[str, int] | None = None,
    *,
    tracking: bool = False,
    running: Collection[str] = (),
) -> dict[str, Wanted]:
    """Everything that should run, by name.

    Trainers of jobs that are being paused end by themselves: of them, those `running` are left.
    `sizes` are replicas by workload; others get the number of their job or the options. The shared
    pools always run, so that the first job finds them warm; the tracking process if `tracking`.
    """
    sizes = sizes or {}
    wanted = [
        Wanted("environment", WorkerKind.ENVIRONMENT, replicas=options.environment_replicas),
        Wanted("reward", WorkerKind.REWARD, replicas=options.reward_replicas),
    ]
    if tracking:
        wanted.append(Wanted("tracking", WorkerKind.TRACKING))
    for job in jobs:
        if job.spec.model.endpoint is not None:
            continue  # who answers is outside
        if job.state in SERVED:
            wanted += [_trainer(job, options), *_rollouts(job, options)]
        elif job.state is JobState.PAUSING and (trainer := _trainer(job, options)).name in running:
            wanted.append(trainer)
    sized = (
        replace(workload, replicas=sizes.get(workload.name, workload.replicas))
        for workload in wanted
    )
    return {
        workload.name: workload for workload in sized if workload.replicas or not workload.job_id
    }


def replicas_of(wanted: Iterable[Wanted]) -> list[Wanted]:
    """Each replica as a workload of its own, `<name>-<i>`; a trainer stays one workload."""
    return [
        workload if workload.kind is WorkerKind.TRAINER else _replica(workload, index)
        for workload in wanted
        for index in range(workload.replicas)
    ]


def problem(job: LiveJob, options: ControllerOptions) -> str:
    """Why the job cannot run in this installation; empty if it can."""
    unknown = sorted(set(job.spec.rollout.pools) - set(options.pools))
    if unknown:
        allowed = ", ".join(sorted(options.pools))
        return (
            f"rollout.pools: {unknown[0]!r} is not a pool of this installation; allowed: {allowed}"
        )
    return _problem_in_cluster(job.spec) if options.runtime == "kubernetes" else ""


def _problem_in_cluster(spec: JobSpec) -> str:
    """Which field names GPUs of one machine, if one does."""
    for name, devices in (("trainer", spec.trainer.devices), ("rollout", spec.rollout.devices)):
        if devices not in {"auto", "cpu"}:
            return (
                f"{name}.devices: {devices!r} names GPUs of one machine; in a cluster only auto "
                "and cpu are allowed, and Kubernetes chooses the GPUs"
            )
    if spec.rollout.colocate:
        return "rollout.colocate: only on one machine; in a cluster pods do not share GPUs"
    return ""


def pools_of(spec: JobSpec, options: ControllerOptions) -> list[str]:
    """Pools that a job may use, cheapest per token first; spot machines before equal ones."""
    allowed = {name: options.pools[name] for name in spec.rollout.pools or options.pools}
    return sorted(
        allowed, key=lambda name: (_cost_per_token(allowed[name]), not allowed[name].spot, name)
    )


def rollout_name(job_id: str, pool: str) -> str:
    """Name of a job's rollout workload in a pool."""
    return f"rollout-{job_id}" if pool == DEFAULT_POOL else f"rollout-{job_id}-{pool}"


def fixed_rollouts(spec: JobSpec) -> int:
    """Rollout workers of a job that is not scaled: none if an outside endpoint answers."""
    return 0 if spec.model.endpoint is not None else spec.rollout.replicas


def trainer_name(job_id: str) -> str:
    """Name of a job's trainer."""
    return f"trainer-{job_id}"


def _trainer(job: LiveJob, options: ControllerOptions) -> Wanted:
    return Wanted(
        trainer_name(job.job_id),
        WorkerKind.TRAINER,
        job_id=job.job_id,
        world_size=job.spec.trainer.world_size,
        accelerators=0 if job.spec.trainer.devices == "cpu" else 1,
        queue=_queue(job, options),
    )


def _rollouts(job: LiveJob, options: ControllerOptions) -> list[Wanted]:
    """One workload per pool: the cheapest with all replicas, the others with none."""
    return [
        Wanted(
            rollout_name(job.job_id, pool),
            WorkerKind.ROLLOUT,
            job_id=job.job_id,
            pool=pool,
            replicas=0 if index else job.spec.rollout.replicas,
            accelerators=rollout_gpus(job.spec),
            queue=_queue(job, options),
        )
        for index, pool in enumerate(pools_of(job.spec, options))
    ]


def _queue(job: LiveJob, options: ControllerOptions) -> str:
    kueue = options.kubernetes.kueue
    return kueue.tenants.get(job.spec.tenant, kueue.queue)


def _replica(wanted: Wanted, index: int) -> Wanted:
    return replace(wanted, name=f"{wanted.name}-{index}", replicas=1)


def _cost_per_token(pool: PoolOptions) -> float:
    return pool.cost / pool.speed
