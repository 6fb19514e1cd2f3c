"""What is believed of a job: smoothed figures, from noisy counts at irregular times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from paceline.config.service import PoolOptions, ScalingOptions
from paceline_controller.scaling.planner import Speed, fit_speed
from paceline_controller.scaling.signals import JobSignals, PoolSignals

_SIZES_PER_DOUBLING = 2  # how finely batch sizes are told apart
_FORGET = 60.0  # a batch size not seen for so many time constants no longer counts
_LEAST_WEIGHT = 0.02
_PROOF = 2  # steps
_NOISE = 0.2  # by which an event may be off, as long as too few tell how much they differ
_QUICKER = 8.0  # by so much sooner a change is noticed than the average follows
_SURE = 4.0  # standard errors: by chance once in some ten thousand events


@dataclass(frozen=True, slots=True)
class Horizon:
    """How far a moving average looks back: the longer of the two."""

    seconds: float
    events: float

    def weight(self, events: float) -> float:
        """Of so many new events in a moving average."""
        return 1 - (1 - 1 / max(1.0, self.events)) ** events


@dataclass(frozen=True, slots=True)
class PerEvent:
    """Mean amount for an event, and how sure it is; what came since the last one is kept apart."""

    value: float = 0.0
    events: float = 0.0
    square: float = 0.0  # of how far a single event is off, on average
    share: float = 1.0  # of `square` that is left in the mean: 1 / events of a plain mean
    newest: float = 0.0  # mean of the last few
    pending: float = 0.0
    elapsed_s: float = 0.0

    def add(self, amount: float, events: float, seconds: float, memory: Horizon) -> PerEvent:
        """With what came since; at first a plain mean, then a moving one.

        When the newest events show that it is another value now, the older ones are forgotten.
        """
        pending, elapsed_s = self.pending + amount, self.elapsed_s + seconds
        if events <= 0:
            return replace(self, pending=pending, elapsed_s=elapsed_s)
        each, seen = pending / events, self.events + events
        if not self.events:
            return PerEvent(each, seen, (_NOISE * each) ** 2, 1 / events, each)
        by_time = -math.expm1(-elapsed_s / memory.seconds)
        weight = max(min(by_time, memory.weight(events)), events / seen)
        off, keep = each - self.newest, 1 - weight  # from the newest: a change is no noise
        quick = max(weight, Horizon(0.0, memory.events / _QUICKER).weight(events))
        found = PerEvent(
            value=self.value + weight * (each - self.value),
            events=seen,
            square=keep * (self.square + weight * off**2 * events),
            share=keep**2 * self.share + weight**2 / events,
            newest=self.newest + quick * off,
        )
        return found.renewed(max(1.0, 2 * memory.events / _QUICKER - 1))

    def renewed(self, few: float) -> PerEvent:
        """Only what is new, if that is surely different; it rests on so many events."""
        sure = _SURE * math.sqrt(self.square / few)
        if self.events <= few or abs(self.newest - self.value) <= sure:
            return self
        return replace(self, value=self.newest, events=few, share=1 / few)

    @property
    def known(self) -> bool:
        """There was an event, and something was seen of it."""
        return self.events > 0 and self.value > 0

    @property
    def error(self) -> float:
        """Standard error of the mean, relative to it; all of it as long as there is none."""
        return math.sqrt(self.square * self.share) / self.value if self.value > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """What a worker of speed 1 does with about so many requests at once."""

    requests: float
    token_s: float  # for a token of each
    weight: float


@dataclass(frozen=True, slots=True)
class Estimates:
    """Of one job."""

    step_s: PerEvent = PerEvent()  # of a trainer step, without waiting
    wait_s: PerEvent = PerEvent()  # for the batch of a step, with as many workers as now
    tokens: PerEvent = PerEvent()  # sampled for a group that can be trained
    points: Mapping[int, Point] = field(default_factory=dict[int, Point])
    spread_s: PerEvent = PerEvent()  # of a version, until most rollout workers have it
    sampled: float = 0.0  # tokens so far, by warm workers
    generating: float = 1.0  # share of open episodes that are in a rollout worker
    idle: float = 0.0  # share of time that warm workers had nothing to do

    @property
    def known(self) -> bool:
        """Enough to plan with."""
        return self.step_s.known and self.tokens.known and bool(self.points)

    def tokens_at_least(self, open_groups: float) -> float:
        """Sampled for a group: what groups have taken so far, those under way too.

        The first that are made are the short ones, and all of a batch may be under way for long:
        what has been sampled is shared out evenly.
        """
        groups = max(1.0, open_groups + self.tokens.events)
        return max(self.tokens.value, self.sampled / groups)

    @property
    def wait_share(self) -> float:
        """Of the trainer's time; a long wait counts before it is over."""
        waits_s = max(self.wait_s.value, self.wait_s.pending)
        whole_s = waits_s + max(self.step_s.value, 1e-9)
        return waits_s / whole_s

    def waits_often(self, allowed: float) -> bool:
        """The trainer surely waits too long; the fewer steps show it, the clearer it has to be."""
        waits = self.wait_share
        error = waits * (1 - waits) * math.hypot(self.wait_s.error, self.step_s.error)
        return waits - error > allowed

    def waits_seldom(self, allowed: float) -> bool:
        """Steps have shown that so many workers are enough."""
        return self.wait_s.events >= _PROOF and self.wait_share <= allowed

    @property
    def speed(self) -> Speed | None:
        """The law of a worker of speed 1."""
        return fit_speed((p.requests, p.token_s, p.weight) for p in self.points.values())


def learn(
    old: Estimates,
    job: JobSignals,
    *,
    seconds: float,
    pools: Mapping[str, PoolOptions],
    options: ScalingOptions,
) -> Estimates:
    """What is believed after a look that covers so many seconds."""
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
    """One point for each batch size that was seen; what is not seen any more fades."""
    fade = math.exp(-seconds / (_FORGET * options.smooth_s))
    found = {
        size: replace(point, weight=point.weight * fade)
        for size, point in old.items()
        if point.weight * fade > _LEAST_WEIGHT
    }
    share = -math.expm1(-seconds / options.smooth_s)
    for name, pool in job.pools.items():
        if pool.tokens > 0 and pool.busy_s > 0 and pool.requests >= 1:
            rate = pool.tokens / pool.busy_s / pools[name].speed
            size = round(_SIZES_PER_DOUBLING * math.log2(pool.requests))
            found[size] = _mixed(found.get(size), pool.requests, pool.requests / rate, share)
    return found


def _mixed(point: Point | None, requests: float, token_s: float, share: float) -> Point:
    if point is None:
        return Point(requests, token_s, share)
    # The share that makes the first few samples a plain mean.
    part = share / (share + point.weight * (1 - share))
    return Point(
        point.requests + part * (requests - point.requests),
        point.token_s + part * (token_s - point.token_s),
        min(1.0, point.weight + share * (1 - point.weight)),
    )
