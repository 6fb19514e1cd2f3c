"""Sizes the rollout workers of a job, and places them in pools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.config.sections.scaling import ScalingOptions
from paceline.config.service import ControllerOptions
from paceline_controller.jobs.plan import pools_of
from paceline_controller.scaling.estimates import Estimates, PerEvent, learn
from paceline_controller.scaling.planner import needed_rate, overlap_steps
from paceline_controller.scaling.pools import Counts, Delivery, Room, shrink, watch
from paceline_controller.scaling.signals import JobSignals, PoolSignals
from paceline_controller.scaling.size_history import SizeHistory, follow

_IDLE = 0.5  # share of idle time above which sampling is not the bottleneck
_NOTHING = PoolSignals()


@dataclass(frozen=True, slots=True)
class JobMemory:
    """State of a job between decisions."""

    estimates: Estimates = field(default_factory=Estimates)
    pace: SizeHistory = field(default_factory=SizeHistory)
    deliveries: Mapping[str, Delivery] = field(default_factory=dict[str, Delivery])
    moving: float = 0.0  # workers of speed 1 that are moving to cheaper pools
    wish: int = 0  # workers that it would have with unlimited capacity


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The next placement; `moving` as in `JobMemory`."""

    counts: Counts
    pace: SizeHistory
    moving: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Workers that a job should have, in workers of speed 1, and the evidence for a change."""

    workers: float
    starves: bool
    plenty: bool
    why: str
    doubt: float = 0.0  # standard error of `workers`, relative to it
    rate: float = 0.0  # tokens per second that are needed; 0: unknown


@dataclass(frozen=True, slots=True)
class JobDecision:
    """Workers by pool, the memory for the next decision, and the target behind it."""

    counts: Counts
    memory: JobMemory
    target: Target


def target_of(
    job: JobSignals, believed: Estimates, *, size: float, options: ScalingOptions
) -> Target:
    """The planner's result plus a margin; a guess while too little is known."""
    speed = believed.speed
    if not believed.known or speed is None:
        if job.step:
            # An earlier controller saw its steps and chose this size; keep it.
            return Target(size, starves=False, plenty=False, why="has not seen a step yet")
        return _guess(job, believed, size=size, options=options)
    spec = job.spec.experience
    overlap = overlap_steps(
        max_staleness=spec.max_staleness, publish_every=job.spec.trainer.publish_every
    )
    waits = believed.wait_share
    rate = needed_rate(
        per_step=believed.tokens.value * spec.batch_groups,
        step_s=believed.step_s.value,
        overlap=overlap,
        spread_s=believed.spread_s.value,
        wait_share=options.sync_wait,
    )
    requests = _requests(job, believed, overlap)
    workers = speed.workers(rate, requests=requests, max_requests=job.spec.rollout.max_concurrent)
    useful = max(1.0, requests / options.requests_each)
    error = math.hypot(believed.step_s.error, believed.tokens.error)
    more = speed.workers(
        rate * (1 + error), requests=requests, max_requests=job.spec.rollout.max_concurrent
    )
    idles = bool(overlap) and believed.idle > _IDLE
    return Target(
        workers=min(workers * (1 + options.margin), useful),
        starves=believed.waits_often(_least_wait(overlap, options)) and not idles,
        plenty=(believed.waits_seldom(_most_wait(overlap, options)) or idles) and not job.measuring,
        why=f"trainer waits {waits:.0%}; {rate:.0f} tokens/s are needed",
        doubt=max(error, more / workers - 1),
        rate=rate,
    )


def _least_wait(overlap: int, options: ScalingOptions) -> float:
    """Share of its time that a trainer waits when workers are too few.

    A synchronous one waits even with as many as are wanted: their margin shortens what it may.
    """
    if overlap:
        return options.starved
    waits = options.sync_wait / (1 - options.sync_wait) / (1 + options.margin)
    return waits / (1 + waits)


def _most_wait(overlap: int, options: ScalingOptions) -> float:
    """Share up to which workers may be too many: what the margin is there for is no reason."""
    return max(options.starved, options.margin) if overlap else options.sync_wait


def _guess(job: JobSignals, believed: Estimates, *, size: float, options: ScalingOptions) -> Target:
    """Before the first step: as many as it takes to run everything that is admitted at once.

    And, as soon as it is seen how fast a worker is, as many as the planner says of a step of
    `first_step_s` and of the tokens that groups have taken so far.
    """
    spec = job.spec.experience
    admitted = max(size, job.wanted_episodes / job.spec.rollout.max_concurrent)
    speed = believed.speed
    if speed is None:
        return Target(admitted, starves=True, plenty=False, why="before the first step")
    overlap = overlap_steps(
        max_staleness=spec.max_staleness, publish_every=job.spec.trainer.publish_every
    )
    tokens = believed.tokens_at_least(job.open_episodes / job.group_size)
    rate = needed_rate(
        per_step=tokens * spec.batch_groups,
        step_s=options.first_step_s,
        overlap=overlap,
        spread_s=0.0,
        wait_share=options.sync_wait,
    )
    requests = _requests(job, believed, overlap)
    workers = speed.workers(rate, requests=requests, max_requests=job.spec.rollout.max_concurrent)
    useful = max(1.0, requests / options.requests_each)
    return Target(
        workers=max(admitted, min(workers * (1 + options.margin), useful)),
        starves=True,
        plenty=False,
        why=f"before the first step; a group has taken {tokens:.0f} tokens so far",
    )


def _requests(job: JobSignals, believed: Estimates, overlap: int) -> float:
    """Requests at once in all workers when sampling has to hurry and the trainer does not wait.

    One batch is trained then, and those of the steps that overlap are being sampled.
    """
    spec = job.spec.experience
    episodes = max(1, overlap) * spec.batch_groups * job.group_size
    if spec.max_in_flight is not None:
        episodes = min(episodes, max(spec.max_in_flight, job.group_size))
    return max(1.0, episodes * believed.generating)


def size_job(
    job: JobSignals,
    *,
    current: Counts,
    free: Counts,
    max_workers: int,
    memory: JobMemory,
    options: ControllerOptions,
    seconds: float,
    now_s: float,
) -> JobDecision:
    """The next counts by pool of a job that is scaled.

    `free` is the capacity of pools for it, `max_workers` its limit over all pools.
    """
    scaling = options.scaling
    believed = learn(memory.estimates, job, seconds=seconds, pools=options.pools, options=scaling)
    names = pools_of(job.spec, options)
    ready = {name: job.pools.get(name, _NOTHING).ready for name in names}
    deliveries = {
        name: watch(
            memory.deliveries.get(name, Delivery()),
            asked=current.get(name, 0),
            ready=ready[name],
            options=scaling,
            now_s=now_s,
        )
        for name in names
    }
    room = _room(job, options=options, free=free, ready=ready, deliveries=deliveries, now_s=now_s)
    room = replace(
        room,
        max_workers=min(room.max_workers, max_workers),
        min_workers=min(room.min_workers, max_workers),
    )
    size = memory.moving or room.speed(current)
    target = target_of(job, believed, size=size, options=scaling)
    if any(current.values()):
        plan = _next(job, room, target, current, memory=memory, options=scaling, now_s=now_s)
    else:
        first = job.spec.rollout.replicas * options.pools[names[0]].speed
        plan = PoolPlan(room.place(first, at_least={}), memory.pace)
    pace = plan.pace
    if dict(plan.counts) != dict(current):
        pace = pace.changed(now_s)
        if room.speed(plan.counts) >= target.workers * (1 - scaling.scale_up_tolerance):
            believed = replace(believed, wait_s=PerEvent())
    wish = _wish(job, target, plan.counts, options.pools[names[0]].speed)
    kept = JobMemory(believed, pace, deliveries, plan.moving, wish)
    return JobDecision(plan.counts, kept, target)


def _wish(job: JobSignals, target: Target, counts: Counts, speed: float) -> int:
    """Workers that the job would have if it did not share with others."""
    bounds, has = job.spec.rollout.scaling, sum(counts.values())
    assert bounds is not None, "only jobs with rollout.scaling are sized"
    wanted = math.ceil(target.workers / speed) if target.starves else has
    return min(max(wanted, has), bounds.max_replicas)


def _room(
    job: JobSignals,
    *,
    options: ControllerOptions,
    free: Counts,
    ready: Counts,
    deliveries: Mapping[str, Delivery],
    now_s: float,
) -> Room:
    bounds = job.spec.rollout.scaling
    assert bounds is not None, "only jobs with rollout.scaling are sized"
    names = pools_of(job.spec, options)
    return Room(
        pools=names,
        options={name: options.pools[name] for name in names},
        free=free,
        min_workers=bounds.min_replicas,
        max_workers=bounds.max_replicas,
        ready=ready,
        closed=frozenset(n for n in names if now_s < deliveries[n].closed_until_s),
    )


def _next(
    job: JobSignals,
    room: Room,
    target: Target,
    current: Counts,
    *,
    memory: JobMemory,
    options: ScalingOptions,
    now_s: float,
) -> PoolPlan:
    size = memory.moving or room.speed(current)
    step = follow(
        memory.pace,
        size=size,
        target=target.workers,
        doubt=target.doubt,
        may_grow=target.starves,
        may_shrink=target.plenty,
        options=options,
        now_s=now_s,
    )
    goal = max(step.goal, min(size, _running(job)))
    if memory.moving and step.goal <= size:
        counts = shrink(room, goal, current)
        surplus = room.speed(counts) - goal
        over = surplus < max(pool.speed for pool in room.options.values())
        return PoolPlan(counts, step.pace, 0.0 if over else goal)
    if step.goal < size and sum(current.values()) > room.min_workers:
        return PoolPlan(shrink(room, goal, current), step.pace)
    counts = room.place(step.goal, at_least=current)
    rests = (
        dict(counts) == dict(current)
        and now_s - memory.pace.changed_s >= options.scale_down_stabilization_s
    )
    if rests and target.rate:
        return _move(room, current, step.pace, options)
    return PoolPlan(counts, step.pace)


def _running(job: JobSignals) -> float:
    """Workers that the current requests need to run without queueing."""
    requests = sum(pool.open_requests for pool in job.pools.values())
    return math.ceil(requests / job.spec.rollout.max_concurrent)


def _move(room: Room, current: Counts, pace: SizeHistory, options: ScalingOptions) -> PoolPlan:
    """Move to cheaper pools; expensive workers stop as their replacements become ready."""
    size = room.speed(current)
    best = room.place(size, at_least={})
    both = {name: max(best[name], current.get(name, 0)) for name in room.pools}
    worth = room.cost(best) < room.cost(current) * (1 - options.scale_up_tolerance)
    if not worth or sum(both.values()) > room.max_workers:
        return PoolPlan(current, pace)
    return PoolPlan(both, pace, size)
