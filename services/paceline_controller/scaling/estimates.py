"""Estimates about a job: moving averages of noisy counts taken at irregular times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from paceline.config.sections.scaling import ScalingOptions
from paceline.config.service import PoolOptions
from paceline_controller.scaling.planner import Speed, fit_speed
from paceline_controller.scaling.signals import JobSignals, PoolSignals

_SIZES_PER_DOUBLING = 2  # resolution of batch sizes
_FORGET = 60.0  # time constants until an unseen batch size fades
_LEAST_WEIGHT = 0.02
_PROOF = 2  # steps
_NOISE = 0.2  # assumed relative deviation of an event, until it can be measured
_QUICKER = 8.0  # how much faster changes are detected than the average follows
_SURE = 4.0  # standard errors: a false alarm in some ten thousand events


@dataclass(frozen=True, slots=True)
class Horizon:
    """How far a moving average looks back: the longer of the two."""

    seconds: float
    events: float

    def weight(self, events: float) -> float:
        """Weight of new events in a moving average."""
        return 1 - (1 - 1 / max(1.0, self.events)) ** events


@dataclass(frozen=True, slots=True)
class PerEvent:
    """Mean amount per event, and its uncertainty; amounts since the last event are pending."""

    value: float = 0.0
    events: float = 0.0
    square: float = 0.0  # mean squared deviation of a single event
    share: float = 1.0  # of `square` in the variance of the mean: 1 / events of a plain mean
    newest: float = 0.0  # mean of the last few
    pending: float = 0.0
    elapsed_s: float = 0.0

    def add(self, amount: float, events: float, seconds: float, memory: Horizon) -> PerEvent:
        """Add new events; a plain mean at first, then a moving one.

        If the newest events show that the value has changed, older ones are forgotten.
        """
        pending, elapsed_s = self.pending + amount, self.elapsed_s + seconds
        if events <= 0:
            return replace(self, pending=pending, elapsed_s=elapsed_s)
        per_event, seen = pending / events, self.events + events
        if not self.events:
            return PerEvent(per_event, seen, (_NOISE * per_event) ** 2, 1 / events, per_event)
        by_time = -math.expm1(-elapsed_s / memory.seconds)
        weight = max(min(by_time, memory.weight(events)), events / seen)
        off, keep = (
            per_event - self.newest,
            1 - weight,
        )  # relative to the newest: a change is not noise
        quick = max(weight, Horizon(0.0, memory.events / _QUICKER).weight(events))
        estimate = PerEvent(
            value=self.value + weight * (per_event - self.value),
            events=seen,
            square=keep * (self.square + weight * off**2 * events),
            share=keep**2 * self.share + weight**2 / events,
            newest=self.newest + quick * off,
        )
        return estimate.renewed(max(1.0, 2 * memory.events / _QUICKER - 1))

    def renewed(self, few: float) -> PerEvent:
        """Reset to the mean of the newest `few` events, if that differs significantly."""
        sure = _SURE * math.sqrt(self.square / few)
        if self.events <= few or abs(self.newest - self.value) <= sure:
            return self
        return replace(self, value=self.newest, events=few, share=1 / few)

    @property
    def known(self) -> bool:
        """Whether there was an event, with a positive mean."""
        return self.events > 0 and self.value > 0

    @property
    def error(self) -> float:
        """Relative standard error of the mean; 1 while there is none."""
        return math.sqrt(self.square * self.share) / self.value if self.value > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """Measured speed of a worker of speed 1 at some number of concurrent requests."""

    requests: float
    token_s: float  # duration of a decode step
    weight: float


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates about one job."""

    step_s: PerEvent = PerEvent()  # of a trainer step, without waiting
    wait_s: PerEvent = PerEvent()  # for the batch of a step, with the current workers
    tokens: PerEvent = PerEvent()  # sampled for a group that can be trained
    points: Mapping[int, Point] = field(default_factory=dict[int, Point])
    spread_s: PerEvent = PerEvent()  # of a version, until most rollout workers have it
    sampled: float = 0.0  # tokens so far, by warm workers
    generating: float = 1.0  # share of open episodes with a request in a rollout worker
    idle: float = 0.0  # share of time that warm workers were idle

    @property
    def known(self) -> bool:
        """Whether there is enough to plan with."""
        return self.step_s.known and self.tokens.known and bool(self.points)

    def tokens_at_least(self, open_groups: float) -> float:
        """Lower bound on tokens per group, which includes groups in progress.

        Short groups finish first, and a whole batch may be in progress for long, so all sampled
        tokens are divided by all groups.
        """
        groups = max(1.0, open_groups + self.tokens.events)
        return max(self.tokens.value, self.sampled / groups)

    @property
    def wait_share(self) -> float:
        """Share of the trainer's time spent waiting, including an unfinished wait."""
        waits_s = max(self.wait_s.value, self.wait_s.pending)
        whole_s = waits_s + max(self.step_s.value, 1e-9)
        return waits_s / whole_s

    def waits_often(self, allowed: float) -> bool:
        """Whether the trainer waits too long, by more than the standard error."""
        waits = self.wait_share
        error = waits * (1 - waits) * math.hypot(self.wait_s.error, self.step_s.error)
        return waits - error > allowed

    def waits_seldom(self, allowed: float) -> bool:
        """Whether enough steps have shown that the current workers suffice."""
        return self.wait_s.events >= _PROOF and self.wait_share <= allowed

    @property
    def speed(self) -> Speed | None:
        """The speed model of a worker of speed 1; None without measurements."""
        return fit_speed((p.requests, p.token_s, p.weight) for p in self.points.values())


def learn(
    old: Estimates,
    job: JobSignals,
    *,
    seconds: float,
    pools: Mapping[str, PoolOptions],
    options: ScalingOptions,
) -> Estimates:
    """Update estimates with signals that cover `seconds`."""
    share = -math.expm1(-seconds / options.smooth_s)
    steps = Horizon(options.smooth_s, options.smooth_steps)
    batches = Horizon(options.smooth_s, options.smooth_steps * job.spec.experience.batch_groups)
    working = [pool for pool in job.pools.values() if pool.warm]
    return Estimates(
        step_s=old.step_s.add(job.step_s, job.steps, seconds, steps),
        wait_s=old.wait_s.add(job.wait_s, job.steps, seconds, steps),
        tokens=old.tokens.add(job.tokens, job.groups, seconds, batches),
        spread_s=old.spread_s.add(job.spreading_s, job.published, seconds, steps),
        points=_learn_points(old.points, job, seconds=seconds, pools=pools, options=options),
        sampled=old.sampled + sum(pool.tokens for pool in job.pools.values()),
        generating=_toward(old.generating, _generating(job), share),
        idle=_toward(old.idle, _idle(working), share),
    )


def _toward(old: float, new: float | None, share: float) -> float:
    return old if new is None else old + share * (float(new) - old)


def _generating(job: JobSignals) -> float | None:
    if not job.open_episodes:
        return None
    requests = sum(pool.open_requests for pool in job.pools.values())
    return min(1.0, requests / job.open_episodes) if requests else None


def _idle(working: Iterable[PoolSignals]) -> float | None:
    pools = list(working)
    idle_s, busy_s = sum(p.idle_s for p in pools), sum(p.busy_s for p in pools)
    return idle_s / (idle_s + busy_s) if idle_s + busy_s > 0 else None


def _learn_points(
    old: Mapping[int, Point],
    job: JobSignals,
    *,
    seconds: float,
    pools: Mapping[str, PoolOptions],
    options: ScalingOptions,
) -> dict[int, Point]:
    """One point per observed batch size; those not seen again fade."""
    fade = math.exp(-seconds / (_FORGET * options.smooth_s))
    points = {
        size: replace(point, weight=point.weight * fade)
        for size, point in old.items()
        if point.weight * fade > _LEAST_WEIGHT
    }
    share = -math.expm1(-seconds / options.smooth_s)
    for name, pool in job.pools.items():
        if pool.tokens > 0 and pool.busy_s > 0 and pool.requests >= 1:
            rate = pool.tokens / pool.busy_s / pools[name].speed
            size = round(_SIZES_PER_DOUBLING * math.log2(pool.requests))
            points[size] = _mixed(points.get(size), pool.requests, pool.requests / rate, share)
    return points


def _mixed(point: Point | None, requests: float, token_s: float, share: float) -> Point:
    if point is None:
        return Point(requests, token_s, share)
    # A plain mean of the first few samples, then a moving one.
    part = share / (share + point.weight * (1 - share))
    return Point(
        point.requests + part * (requests - point.requests),
        point.token_s + part * (token_s - point.token_s),
        min(1.0, point.weight + share * (1 - point.weight)),
    )
