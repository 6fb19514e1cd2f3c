"""Sizes the environment and reward workers, which all jobs share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from paceline.config.sections.scaling import EnvironmentScaling, RewardScaling
from paceline.config.service import ControllerOptions
from paceline_controller.scaling.planner import scorers
from paceline_controller.scaling.signals import RewardSignals, Signals
from paceline_controller.scaling.size_history import SizeHistory, follow


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """State of a shared pool between decisions."""

    pace: SizeHistory = field(default_factory=SizeHistory)
    cpu: float = 0.0  # cores used, smoothed
    service_s: float = 0.0  # worker time per answer, smoothed
    load: float = 0.0  # busy workers on average, smoothed


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """Replicas, the memory for the next decision, and the reason."""

    replicas: int
    memory: PoolMemory
    why: str


@dataclass(frozen=True, slots=True)
class _Bounds:
    min_replicas: int
    max_replicas: int
    may_be_none: bool  # unused for long enough


def size_environment(
    signals: Signals,
    scaling: EnvironmentScaling,
    *,
    current: int,
    memory: PoolMemory,
    options: ControllerOptions,
    idle: bool,
    now_s: float,
) -> PoolDecision:
    """Size by the episodes that are open or could be, and by the CPU time of running ones."""
    now = signals.environment
    episodes = sum(job.wanted_episodes for job in signals.jobs)
    cpu = _smooth(memory.cpu, now.cpu_share, signals, options)
    by_slots = episodes / (now.slots * scaling.occupancy) if now.slots else 0.0
    target = max(by_slots, cpu / scaling.occupancy)
    bounds = _Bounds(options.environment_replicas, scaling.max_replicas, idle)
    replicas, pace = _size(target, bounds, current, memory.pace, options, now_s)
    why = f"{episodes} episodes; {cpu:.1f} cores"
    return PoolDecision(replicas, replace(memory, pace=pace, cpu=cpu), why)


def size_reward(
    signals: Signals,
    scaling: RewardScaling,
    *,
    current: int,
    memory: PoolMemory,
    options: ControllerOptions,
    idle: bool,
    now_s: float,
) -> PoolDecision:
    """Size by the time to score the queue, and by the utilization of the workers."""
    now = signals.reward
    service_s = _service_s(now, memory, signals, options)
    spent = now.busy_s / signals.seconds if signals.seconds > 0 else memory.load
    load = _smooth(memory.load, spent, signals, options)
    queued = scorers(pending=now.pending, service_s=service_s, queue_s=scaling.queue_s)
    target = max(queued, load / scaling.occupancy, 1.0 if now.pending else 0.0)
    bounds = _Bounds(options.reward_replicas, scaling.max_replicas, idle and not now.pending)
    replicas, pace = _size(target, bounds, current, memory.pace, options, now_s)
    why = f"{now.pending:.0f} answers wait; {service_s:.3f} s for each"
    return PoolDecision(replicas, replace(memory, pace=pace, service_s=service_s, load=load), why)


def _service_s(
    now: RewardSignals, memory: PoolMemory, signals: Signals, options: ControllerOptions
) -> float:
    if now.scored <= 0:
        return memory.service_s
    seen = now.busy_s / now.scored
    return _smooth(memory.service_s, seen, signals, options) if memory.service_s else seen


def _smooth(old: float, new: float, signals: Signals, options: ControllerOptions) -> float:
    share = -math.expm1(-signals.seconds / options.scaling.smooth_s)
    return old + share * (new - old)


def _size(
    target: float,
    bounds: _Bounds,
    current: int,
    pace: SizeHistory,
    options: ControllerOptions,
    now_s: float,
) -> tuple[int, SizeHistory]:
    """Zero when unused, at least the lower bound otherwise; both take effect at once."""
    if bounds.may_be_none:
        return 0, pace if current == 0 else pace.changed(now_s)
    upper = max(bounds.min_replicas, bounds.max_replicas)
    target = min(max(target, bounds.min_replicas), upper)
    step = follow(
        pace,
        size=float(current),
        target=target,
        doubt=0.0,
        may_grow=True,
        may_shrink=True,
        options=options.scaling,
        now_s=now_s,
    )
    replicas = min(max(math.ceil(round(step.goal, 6)), bounds.min_replicas), upper)
    return replicas, step.pace if replicas == current else step.pace.changed(now_s)
