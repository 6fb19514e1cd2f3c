"""Computes the capacity that a job needs from measurements. No side effects.

Sources: ECHO-2 (arXiv 2602.02192) for the provisioning rule and for choosing the cheapest workers,
RollArt (arXiv 2512.22560) for sizing scorers by their queue. The overlap that follows from the
ledger's admission and the model of an engine's speed are derived below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_KNEE = 4.0  # this multiple of the knee reaches four fifths of the throughput limit
_SPREAD = 1.5  # ratio of batch sizes needed to separate the fixed part from noise


def provisioned_rate(*, per_step: float, step_s: float, steps: int, spread_s: float) -> float:
    """ECHO-2's provisioning rule: units per second so that a trainer never waits.

    Its condition is `spread_s + steps * per_step / rate <= steps * step_s`: the data for `steps`
    trainer steps is produced while they run, less the time in which new weights spread. Infinite
    if no time is left.
    """
    left_s = steps * step_s - spread_s
    return steps * per_step / left_s if left_s > 0 else math.inf


def overlap_steps(*, max_staleness: int, publish_every: int) -> int:
    """Trainer steps that pass while a newly admitted batch is sampled.

    The ledger admits `(S + s + 1) * B` groups, s being the step of the weights in use. After a
    publication the first batch thus admitted is taken `S - publish_every + 1` steps later.
    """
    return max(0, max_staleness - publish_every + 1)


def needed_rate(
    *, per_step: float, step_s: float, overlap: int, spread_s: float, wait_share: float
) -> float:
    """Units per second that a job needs.

    The provisioning rule over the steps that overlap with sampling, capped at the rate that limits
    the trainer's wait to `wait_share` of its time without any overlap (a synchronous job, or one
    whose weights take as long to spread as it may lag).
    """
    allowed_s = step_s * wait_share / (1 - wait_share)
    serial = per_step / max(allowed_s - spread_s, allowed_s / 2)
    if not overlap:
        return serial
    rule = provisioned_rate(per_step=per_step, step_s=step_s, steps=overlap, spread_s=spread_s)
    return max(min(rule, serial), per_step / step_s)


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed model: a decode step with c concurrent requests takes `fixed_s + c * request_s`.

    `fixed_s` is the cost whatever the batch (reading the weights), `request_s` that of each
    request.
    """

    fixed_s: float
    request_s: float
    seen: float = 0.0  # smallest number of requests at which this was measured

    def rate(self, requests: float) -> float:
        """Tokens per second of one worker with `requests` concurrent requests."""
        return requests / (self.fixed_s + requests * self.request_s) if requests > 0 else 0.0

    def workers(self, rate: float, *, requests: float, max_requests: float) -> float:
        """Workers for `rate` tokens per second with `requests` concurrent in total; not rounded.

        `n` workers with an even share make `requests * n / (fixed_s * n + request_s * requests)`.
        This has a limit; if `rate` exceeds four fifths of it, the result is the number that reaches
        four fifths. A worker runs at most `max_requests` requests. Below `seen` requests its rate
        is not extrapolated: noise at large batches would be magnified.
        """
        full = rate / self.rate(max_requests)
        if self.fixed_s <= 0:
            return full
        left = requests - rate * self.fixed_s
        need = rate * self.request_s * requests / left if left > 0 else math.inf
        need = min(need, _KNEE * self.request_s * requests / self.fixed_s)
        if self.seen and requests / need < self.seen:
            need = rate / self.rate(self.seen)
        return max(full, need)


def fit_speed(points: Iterable[tuple[float, float, float]]) -> Speed | None:
    """Fit the speed model to points (concurrent requests, seconds per decode step, weight).

    Least squares of relative errors; the fixed part is 0 while batch sizes differ too little to
    separate it from noise. None without points.
    """
    usable = [(c, t, w / t**2) for c, t, w in points if c > 0 and t > 0 and w > 0]
    if not usable:
        return None
    total = sum(w for *_, w in usable)
    mean_c = sum(w * c for c, _, w in usable) / total
    mean_t = sum(w * t for _, t, w in usable) / total
    sizes = [c for c, *_ in usable]
    if max(sizes) >= _SPREAD * min(sizes):
        across = sum(w * (c - mean_c) ** 2 for c, _, w in usable)
        slope = sum(w * (c - mean_c) * (t - mean_t) for c, t, w in usable) / across
        fixed = mean_t - slope * mean_c
        if fixed > 0 and slope > 0:
            return Speed(fixed, slope, min(sizes))
        if slope <= 0:  # requests seem to be free: assume that they cost a tenth
            return Speed(0.9 * mean_t, 0.1 * mean_t / mean_c, min(sizes))
    square = sum(w * c * c for c, _, w in usable)
    return Speed(0.0, sum(w * c * t for c, t, w in usable) / square)


def scorers(*, pending: float, service_s: float, queue_s: float) -> int:
    """Reward workers that clear a queue within `queue_s`: `ceil(pending * service_s / queue_s)`."""
    return math.ceil(pending * service_s / queue_s)


@dataclass(frozen=True, slots=True)
class Offer:
    """Workers of one kind: the speed and cost of each, and bounds on their number."""

    name: str
    speed: float
    cost: float
    min_count: int
    max_count: int


def cheapest(need: float, offers: Sequence[Offer]) -> dict[str, int]:
    """Workers of each kind whose combined speed reaches `need`, or all that are available.

    ECHO-2's activation: kinds in the order given (the cheapest per unit of speed first) until the
    need is met; then superfluous workers are removed, the most expensive ones first.
    """
    chosen = {offer.name: offer.min_count for offer in offers}
    speed = speed_of(chosen, offers)
    for offer in offers:
        more = math.ceil(_round((need - speed) / offer.speed))
        taken = max(0, min(more, offer.max_count - offer.min_count))
        chosen[offer.name] += taken
        speed += taken * offer.speed
    for offer in sorted(offers, key=lambda x: x.cost, reverse=True):
        spare = math.floor(_round((speed - need) / offer.speed))
        dropped = max(0, min(spare, chosen[offer.name] - offer.min_count))
        chosen[offer.name] -= dropped
        speed -= dropped * offer.speed
    return chosen


def speed_of(chosen: Mapping[str, int], offers: Iterable[Offer]) -> float:
    """Combined speed of the chosen workers."""
    return sum(chosen.get(offer.name, 0) * offer.speed for offer in offers)


def _round(value: float) -> float:
    """Round away floating-point error, which must not cost an extra worker."""
    return round(value, 9)
