"""From signals to sizes. Pure: the same arguments give the same answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.config.service import ControllerOptions
from paceline.types import WorkerKind
from paceline_controller.plan import pools_of, rollout_name
from paceline_controller.scaling.rollout import JobMemory, Target, size_job
from paceline_controller.scaling.shared import PoolMemory, size_environment, size_reward
from paceline_controller.scaling.signals import JobSignals, Signals

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered between decisions."""

    jobs: Mapping[str, JobMemory] = field(default_factory=dict[str, JobMemory])
    environment: PoolMemory = field(default_factory=PoolMemory)
    reward: PoolMemory = field(default_factory=PoolMemory)
    idle_since_s: float = math.inf  # no job is live


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas by workload, of what is scaled; what to remember; why, by workload."""

    sizes: Sizes
    memory: Memory
    reasons: Mapping[str, str]
    targets: Mapping[str, Target]  # by job


def decide(
    signals: Signals,
    sizes: Sizes,
    *,
    options: ControllerOptions,
    memory: Memory,
    now_s: float,
) -> Decision:
    """The next sizes, given those that are asked for now.

    Jobs that are not in the signals get none: they are over or paused. Jobs without
    `rollout.scaling` keep what they have, and take their room in the pools.
    """
    made: dict[str, int] = {}
    reasons: dict[str, str] = {}
    targets: dict[str, Target] = {}
    memories: dict[str, JobMemory] = {}
    held = {job.job_id: _held(job, sizes, options) for job in signals.jobs}
    for job in sorted(signals.jobs, key=lambda each: each.job_id):
        if job.spec.rollout.scaling is None:
            continue
        decision = size_job(
            job,
            current=held[job.job_id],
            free=_free(job, signals, held, options),
            memory=memory.jobs.get(job.job_id, JobMemory()),
            options=options,
            seconds=signals.seconds,
            now_s=now_s,
        )
        held[job.job_id] = dict(decision.counts)
        memories[job.job_id] = decision.memory
        targets[job.job_id] = decision.target
        for pool, count in decision.counts.items():
            name = rollout_name(job.job_id, pool)
            made[name], reasons[name] = count, decision.target.why
    since_s = math.inf if signals.jobs else min(memory.idle_since_s, now_s)
    found = replace(memory, jobs=memories, idle_since_s=since_s)
    return _shared(
        Decision(made, found, reasons, targets), signals, sizes, options=options, now_s=now_s
    )


def _held(job: JobSignals, sizes: Sizes, options: ControllerOptions) -> dict[str, int]:
    """What a job has in each pool."""
    names = pools_of(job.spec, options)
    if job.spec.rollout.scaling is None:
        return {names[0]: job.spec.rollout.replicas}
    return {name: sizes.get(rollout_name(job.job_id, name), 0) for name in names}


def _free(
    job: JobSignals,
    signals: Signals,
    held: Mapping[str, Mapping[str, int]],
    options: ControllerOptions,
) -> dict[str, int]:
    """What the pools have for a job, the others keeping theirs and getting what they must have."""
    free = {name: pool.max_replicas for name, pool in options.pools.items()}
    for other in signals.jobs:
        if other.job_id == job.job_id:
            continue
        has = held[other.job_id]
        for pool, count in has.items():
            free[pool] -= count
        if (bounds := other.spec.rollout.scaling) is not None:
            free[next(iter(has))] -= max(0, bounds.min_replicas - sum(has.values()))
    return {name: max(0, count) for name, count in free.items()}


def _shared(
    decision: Decision,
    signals: Signals,
    sizes: Sizes,
    *,
    options: ControllerOptions,
    now_s: float,
) -> Decision:
    """With the pools that serve all jobs."""
    made, reasons, memory = dict(decision.sizes), dict(decision.reasons), decision.memory
    scaling = options.scaling
    idle = now_s - memory.idle_since_s >= scaling.idle_s
    if scaling.environment is not None:
        name = str(WorkerKind.ENVIRONMENT)
        current = sizes.get(name, options.environment_replicas)
        found = size_environment(
            signals,
            scaling.environment,
            current=current,
            memory=memory.environment,
            options=options,
            idle=idle,
            now_s=now_s,
        )
        made[name], reasons[name] = found.replicas, found.why
        memory = replace(memory, environment=found.memory)
    if scaling.reward is not None:
        name = str(WorkerKind.REWARD)
        found = size_reward(
            signals,
            scaling.reward,
            current=sizes.get(name, options.reward_replicas),
            memory=memory.reward,
            options=options,
            idle=idle,
            now_s=now_s,
        )
        made[name], reasons[name] = found.replicas, found.why
        memory = replace(memory, reward=found.memory)
    return Decision(made, memory, reasons, decision.targets)
