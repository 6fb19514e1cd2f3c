"""How much capacity a job needs. Pure arithmetic on measured figures.

Sources: ECHO-2 (arXiv 2602.02192) for the provisioning rule and for choosing the cheapest workers,
RollArt (arXiv 2512.22560) for scorers that follow their queue. The overlap that this ledger's
admission gives and the law of an engine's speed are derived below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_KNEE = 4.0  # at this multiple of the knee, four fifths of what any number of workers can do
_SPREAD = 1.5  # by which batch sizes must differ to tell a fixed part from noise


def provisioned_rate(*, per_step: float, step_s: float, steps: int, spread_s: float) -> float:
    """ECHO-2's provisioning rule: units per second so that a trainer never waits.

    Its condition is `spread_s + steps * per_step / rate <= steps * step_s`: what so many trainer
    steps use up is made while they last, less the time in which new weights spread. Infinite if
    none is left.
    """
    left_s = steps * step_s - spread_s
    return steps * per_step / left_s if left_s > 0 else math.inf


def overlap_steps(*, max_staleness: int, publish_every: int) -> int:
    """Trainer steps that pass while the batch that is admitted now is made.

    The ledger admits `(S + s + 1) * B` groups, s being the step of the weights in use. After a
    publication the first batch that this lets in is taken `S - publish_every + 1` steps later.
    """
    return max(0, max_staleness - publish_every + 1)


def needed_rate(
    *, per_step: float, step_s: float, overlap: int, spread_s: float, wait_share: float
) -> float:
    """Units per second for a job.

    By the provisioning rule over the steps that overlap with sampling, but no more than what keeps
    the trainer from waiting longer than `wait_share` of its time if nothing overlapped (a
    synchronous job, or one whose weights spread for as long as it may lag).
    """
    allowed_s = step_s * wait_share / (1 - wait_share)
    serial = per_step / max(allowed_s - spread_s, allowed_s / 2)
    if not overlap:
        return serial
    rule = provisioned_rate(per_step=per_step, step_s=step_s, steps=overlap, spread_s=spread_s)
    return max(min(rule, serial), per_step / step_s)


@dataclass(frozen=True, slots=True)
class Speed:
    """A worker's law: with c requests at once, a token for each takes `fixed_s + c * request_s`.

    `fixed_s` is what a decode step costs whatever the batch (reading the weights), `request_s` what
    each request adds.
    """

    fixed_s: float
    request_s: float
    seen: float = 0.0  # smallest number of requests at which this was measured

    def rate(self, requests: float) -> float:
        """Tokens per second of one worker with so many requests at once."""
        return requests / (self.fixed_s + requests * self.request_s) if requests > 0 else 0.0

    def workers(self, rate: float, *, requests: float, max_requests: float) -> float:
        """Workers that make `rate` tokens per second out of `requests` at once; not rounded.

        `n` workers with an even share make `requests * n / (fixed_s * n + request_s * requests)`.
        That has a limit; where four fifths of it are not enough, the number that reaches four
        fifths. A worker runs at most `max_requests` requests at once, and is not taken to be slower
        with fewer than were `seen`: noise at large batches would be magnified.
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
    """The law that points (requests at once, seconds for a token of each, weight) follow.

    Least squares of relative errors; the fixed part is 0 as long as batch sizes differ too little
    to tell it from noise. None without points.
    """
    found = [(c, t, w / t**2) for c, t, w in points if c > 0 and t > 0 and w > 0]
    if not found:
        return None
    total = sum(w for *_, w in found)
    mean_c = sum(w * c for c, _, w in found) / total
    mean_t = sum(w * t for _, t, w in found) / total
    sizes = [c for c, *_ in found]
    if max(sizes) >= _SPREAD * min(sizes):
        across = sum(w * (c - mean_c) ** 2 for c, _, w in found)
        slope = sum(w * (c - mean_c) * (t - mean_t) for c, t, w in found) / across
        fixed = mean_t - slope * mean_c
        if fixed > 0 and slope > 0:
            return Speed(fixed, slope, min(sizes))
        if slope <= 0:  # requests seem to cost nothing: believe a tenth of it
            return Speed(0.9 * mean_t, 0.1 * mean_t / mean_c, min(sizes))
    square = sum(w * c * c for c, _, w in found)
    return Speed(0.0, sum(w * c * t for c, t, w in found) / square)


def scorers(*, pending: float, service_s: float, queue_s: float) -> int:
    """Reward workers that clear a queue within `queue_s`: `ceil(pending * service_s / queue_s)`."""
    return math.ceil(pending * service_s / queue_s)


@dataclass(frozen=True, slots=True)
class Offer:
    """Workers of one kind: what each makes and costs, and how many there have to and can be."""

    name: str
    speed: float
    cost: float
    min_count: int
    max_count: int


def cheapest(need: float, offers: Sequence[Offer]) -> dict[str, int]:
    """How many of each kind, so that their speeds add up to `need`, or to all there is.

    ECHO-2's activation: kinds in the order given (the cheapest per unit of speed first) until the
    need is met; then workers that turn out to be superfluous go, the dearest ones first.
    """
    chosen = {offer.name: offer.min_count for offer in offers}
    made = speed_of(chosen, offers)
    for offer in offers:
        more = math.ceil(_round((need - made) / offer.speed))
        taken = max(0, min(more, offer.max_count - offer.min_count))
        chosen[offer.name] += taken
        made += taken * offer.speed
    for offer in sorted(offers, key=lambda each: each.cost, reverse=True):
        spare = math.floor(_round((made - need) / offer.speed))
        dropped = max(0, min(spare, chosen[offer.name] - offer.min_count))
        chosen[offer.name] -= dropped
        made -= dropped * offer.speed
    return chosen


def speed_of(chosen: Mapping[str, int], offers: Iterable[Offer]) -> float:
    """What the chosen workers make together."""
    return sum(chosen.get(offer.name, 0) * offer.speed for offer in offers)


def _round(value: float) -> float:
    """Sums of decimal fractions are not exact; a worker more for 1e-16 would be wrong."""
    return round(value, 9)
