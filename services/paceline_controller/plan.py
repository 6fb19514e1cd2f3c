"""Jobs and options in, wanted processes out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.config.job import JobSpec
from paceline.config.service import ControllerOptions
from paceline.types import JobState, WorkerKind

# Paused jobs hold no accelerators; cancelling ones are being taken down.
SERVED = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING})


@dataclass(frozen=True, slots=True)
class LiveJob:
    """What the controller looks at in a job that is not over."""

    job_id: str
    state: JobState
    step: int
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class Wanted:
    """A process that should run: one member of a shared pool, or part of a job."""

    name: str
    kind: WorkerKind
    job_id: str = ""  # empty: a shared pool
    world_size: int = 1


def plan(jobs: Iterable[LiveJob], options: ControllerOptions) -> dict[str, Wanted]:
    """Everything that should run, by name.

    The shared pools run as long as the controller, so that a first job finds them warm.
    """
    wanted = [
        *_pool(WorkerKind.ENVIRONMENT, options.environment_replicas),
        *_pool(WorkerKind.REWARD, options.reward_replicas),
    ]
    for job in jobs:
        if job.state in SERVED:
            wanted += _processes(job)
    return {process.name: process for process in wanted}


def _pool(kind: WorkerKind, replicas: int) -> list[Wanted]:
    return [Wanted(f"{kind}-{index}", kind) for index in range(replicas)]


def _processes(job: LiveJob) -> list[Wanted]:
    trainer = Wanted(
        f"trainer-{job.job_id}",
        WorkerKind.TRAINER,
        job_id=job.job_id,
        world_size=job.spec.trainer.world_size,
    )
    rollouts = [
        Wanted(f"rollout-{job.job_id}-{index}", WorkerKind.ROLLOUT, job_id=job.job_id)
        for index in range(job.spec.rollout.replicas)
    ]
    return [trainer, *rollouts]
