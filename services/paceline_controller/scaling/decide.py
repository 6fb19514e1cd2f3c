"""Decides replica counts from signals. A pure function of its arguments."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.config.quota import Quota
from paceline.config.service import ControllerOptions
from paceline.enums import WorkerKind
from paceline.front.api.tenants import Tenant
from paceline_controller.jobs.plan import fixed_rollouts, pools_of, rollout_name
from paceline_controller.jobs.queue import PoolClaim
from paceline_controller.scaling.entitle import WorkerDemand, entitled
from paceline_controller.scaling.rollout import JobMemory, Target, size_job
from paceline_controller.scaling.shared import PoolMemory, size_environment, size_reward
from paceline_controller.scaling.signals import JobSignals, Signals

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """State kept between decisions."""

    jobs: Mapping[str, JobMemory] = field(default_factory=dict[str, JobMemory])
    environment: PoolMemory = field(default_factory=PoolMemory)
    reward: PoolMemory = field(default_factory=PoolMemory)
    idle_since_s: float = math.inf  # no job is live


@dataclass(frozen=True, slots=True)
class Bounds:
    """Quotas of tenants, and claims of queued jobs that wait for pool capacity, in queue order."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict[str, Tenant])
    claims: Sequence[PoolClaim] = ()

    def quota(self, tenant: str) -> Quota:
        """Quota of a tenant; an unknown one has no limits."""
        known = self.tenants.get(tenant)
        return known.quota if known else Quota()


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas and reasons by scaled workload, and the memory for the next decision."""

    sizes: Sizes
    memory: ScalingMemory
    reasons: Mapping[str, str]
    targets: Mapping[str, Target]  # by job


def decide(
    signals: Signals,
    sizes: Sizes,
    *,
    options: ControllerOptions,
    memory: ScalingMemory,
    now_s: float,
    bounds: Bounds | None = None,
) -> Decision:
    """The next sizes, given those currently requested.

    Jobs that are not in the signals get no workers: they are over or paused. Jobs without
    `rollout.scaling` have a fixed size, which counts against the pools.
    """
    wanted_sizes: dict[str, int] = {}
    reasons: dict[str, str] = {}
    targets: dict[str, Target] = {}
    memories: dict[str, JobMemory] = {}
    bounds = bounds or Bounds()
    held = {job.job_id: _held(job, sizes, options) for job in signals.jobs}
    shares = _shares(signals, held, memory, bounds, options)
    for job in sorted(signals.jobs, key=lambda x: x.job_id):
        if job.spec.rollout.scaling is None:
            continue
        more = _more(job, signals, held, bounds)
        free = _free(job, signals, held, options)
        current = held[job.job_id]
        decision = size_job(
            job,
            current=current,
            free={
                pool: min(count, shares[pool][job.job_id], current.get(pool, 0) + more)
                for pool, count in free.items()
                if pool in current
            },
            max_workers=sum(current.values()) + more,
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
            wanted_sizes[name], reasons[name] = count, decision.target.why
    since_s = math.inf if signals.jobs else min(memory.idle_since_s, now_s)
    updated = replace(memory, jobs=memories, idle_since_s=since_s)
    return _shared(
        Decision(wanted_sizes, updated, reasons, targets),
        signals,
        sizes,
        options=options,
        now_s=now_s,
    )


def _held(job: JobSignals, sizes: Sizes, options: ControllerOptions) -> dict[str, int]:
    """Workers of a job in each pool."""
    names = pools_of(job.spec, options)
    if job.spec.rollout.scaling is None:
        return {names[0]: fixed_rollouts(job.spec)}
    return {name: sizes.get(rollout_name(job.job_id, name), 0) for name in names}


def _free(
    job: JobSignals,
    signals: Signals,
    held: Mapping[str, Mapping[str, int]],
    options: ControllerOptions,
) -> dict[str, int]:
    """Capacity of pools for a job, if the others keep their workers and get their minimum."""
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


def _more(
    job: JobSignals,
    signals: Signals,
    held: Mapping[str, Mapping[str, int]],
    bounds: Bounds,
) -> int:
    """Workers that a job may add within the quota of its tenant."""
    quota = bounds.quota(job.spec.tenant).rollout_workers
    if quota is None:
        return sys.maxsize
    for other in signals.jobs:
        if other.spec.tenant == job.spec.tenant:
            has = sum(held[other.job_id].values())
            quota -= has if other.job_id == job.job_id else max(has, _least(other))
    return max(0, quota)


def _least(job: JobSignals) -> int:
    """Minimum number of workers of a job."""
    bounds = job.spec.rollout.scaling
    return fixed_rollouts(job.spec) if bounds is None else bounds.min_replicas


def _shares(
    signals: Signals,
    held: Mapping[str, Mapping[str, int]],
    memory: ScalingMemory,
    bounds: Bounds,
    options: ControllerOptions,
) -> dict[str, dict[str, int]]:
    """Upper limits by pool and job, from a fair division of each pool."""
    wants = {job.job_id: _wants(job, held[job.job_id], memory) for job in signals.jobs}
    owners = {job.job_id: job.spec.tenant for job in signals.jobs}
    weights = {name: tenant.quota.weight for name, tenant in bounds.tenants.items()}
    return {
        name: entitled(
            pool.max_replicas,
            {job_id: want[name] for job_id, want in wants.items() if name in want},
            {job_id: owners[job_id] for job_id, want in wants.items() if name in want},
            [claim for claim in bounds.claims if claim.pool == name],
            weights,
        )
        for name, pool in options.pools.items()
    }


def _wants(
    job: JobSignals, has: Mapping[str, int], memory: ScalingMemory
) -> dict[str, WorkerDemand]:
    """Demand by pool: minimum workers stay where they are; missing ones go to the first pool."""
    known = memory.jobs.get(job.job_id)
    wish = known.wish if known else fixed_rollouts(job.spec)
    must = _least(job)
    more = max(0, wish - sum(has.values()))
    demands: dict[str, WorkerDemand] = {}
    for pool, count in has.items():
        demands[pool] = WorkerDemand(floor=min(must, count), held=count, wish=count)
        must -= demands[pool].floor
    first = next(iter(has))
    demands[first] += WorkerDemand(floor=must, wish=max(must, more))
    return demands


def _shared(
    decision: Decision,
    signals: Signals,
    sizes: Sizes,
    *,
    options: ControllerOptions,
    now_s: float,
) -> Decision:
    """Add the sizes of environment and reward workers."""
    wanted_sizes, reasons, memory = dict(decision.sizes), dict(decision.reasons), decision.memory
    scaling = options.scaling
    idle = now_s - memory.idle_since_s >= scaling.idle_s
    if scaling.environment is not None:
        name = str(WorkerKind.ENVIRONMENT)
        current = sizes.get(name, options.environment_replicas)
        sized = size_environment(
            signals,
            scaling.environment,
            current=current,
            memory=memory.environment,
            options=options,
            idle=idle,
            now_s=now_s,
        )
        wanted_sizes[name], reasons[name] = sized.replicas, sized.why
        memory = replace(memory, environment=sized.memory)
    if scaling.reward is not None:
        name = str(WorkerKind.REWARD)
        sized = size_reward(
            signals,
            scaling.reward,
            current=sizes.get(name, options.reward_replicas),
            memory=memory.reward,
            options=options,
            idle=idle,
            now_s=now_s,
        )
        wanted_sizes[name], reasons[name] = sized.replicas, sized.why
        memory = replace(memory, reward=sized.memory)
    return Decision(wanted_sizes, memory, reasons, decision.targets)
