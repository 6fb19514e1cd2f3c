"""Places the rollout workers of a job in pools: the cheapest first, within all limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.config.sections.scaling import ScalingOptions
from paceline.config.service import PoolOptions
from paceline_controller.scaling.planner import Offer, cheapest

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Delivery:
    """Whether a pool delivers the workers requested from it."""

    ready: int = 0
    late_since_s: float = math.inf  # fewer ready than requested, without progress
    closed_until_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Room:
    """Limits on placing a job's workers: `pools` by price, `free` their capacity for it."""

    pools: Sequence[str]
    options: Mapping[str, PoolOptions]
    free: Counts
    min_workers: int
    max_workers: int
    ready: Counts = field(default_factory=dict[str, int])
    closed: frozenset[str] = frozenset()

    def speed(self, counts: Counts) -> float:
        """Combined speed, in workers of speed 1."""
        return sum(counts.get(name, 0) * self.options[name].speed for name in self.pools)

    def cost(self, counts: Counts) -> float:
        """Combined cost per hour."""
        return sum(counts.get(name, 0) * self.options[name].cost for name in self.pools)

    def place(self, goal: float, *, at_least: Counts, at_most: Counts | None = None) -> Counts:
        """Workers with a combined speed of `goal`.

        Closed pools keep their ready workers, and get more only if the others are full.
        """
        upper = self._within(self.free if at_most is None else at_most)
        lower = {name: min(at_least.get(name, 0), upper[name]) for name in self.pools}
        open_upper = {
            name: min(count, self.ready.get(name, 0)) if name in self.closed else count
            for name, count in upper.items()
        }
        open_lower = {name: min(lower[name], open_upper[name]) for name in self.pools}
        chosen = cheapest(goal, self._offers(open_lower, open_upper))
        if self.speed(chosen) < goal:
            chosen = cheapest(goal, self._offers(chosen, upper))
        return self._clamp(chosen, lower=lower, upper=upper)

    def _within(self, counts: Counts) -> dict[str, int]:
        return {n: max(0, min(counts.get(n, 0), self.free.get(n, 0))) for n in self.pools}

    def _offers(self, lower: Counts, upper: Counts) -> list[Offer]:
        """Offers by pool; its minimum is kept whatever it costs, within the job's limit."""
        left, offers = self.max_workers, list[Offer]()
        for name in self.pools:
            pool = self.options[name]
            least = min(max(lower[name], pool.min_replicas), upper[name], left)
            left -= least
            offers.append(Offer(name, pool.speed, pool.cost, least, upper[name]))
        return offers

    def _clamp(self, chosen: dict[str, int], *, lower: Counts, upper: Counts) -> dict[str, int]:
        """Enforce the job's maximum, and its minimum as far as pools have capacity."""
        over = sum(chosen.values()) - self.max_workers
        for keep in (True, False):
            for name in reversed(self.pools):
                kept = min(max(lower[name], self.options[name].min_replicas), chosen[name])
                gone = max(0, min(over, chosen[name] - (kept if keep else 0)))
                chosen[name] -= gone
                over -= gone
        for name in self.pools:
            more = max(0, min(self.min_workers - sum(chosen.values()), upper[name] - chosen[name]))
            chosen[name] += more
        return chosen


def watch(
    old: Delivery, *, asked: int, ready: int, options: ScalingOptions, now_s: float
) -> Delivery:
    """Update a pool's delivery with a new observation; closes it after `pool_timeout_s`."""
    if now_s < old.closed_until_s:
        return replace(old, ready=ready)
    if ready >= asked:
        return Delivery(ready)
    since_s = now_s if ready > old.ready else min(old.late_since_s, now_s)
    if now_s - since_s >= options.pool_timeout_s:
        return Delivery(ready, closed_until_s=now_s + options.retry_s)
    return Delivery(ready, since_s)


def shrink(room: Room, goal: float, current: Counts) -> Counts:
    """Remove the most expensive workers, while the ready ones suffice for the goal."""
    chosen = dict(room.place(goal, at_least={}, at_most=current))
    ready = {name: room.ready.get(name, 0) for name in room.pools}
    for name in reversed(room.pools):
        there = {n: min(count, ready[n]) for n, count in chosen.items()}
        lacking = goal - room.speed(there)
        kept = min(current.get(name, 0), ready[name], room.free.get(name, 0))
        more = max(0, math.ceil(round(lacking / room.options[name].speed, 9)))
        allowed = chosen[name] + max(0, room.max_workers - sum(chosen.values()))
        chosen[name] = max(chosen[name], min(kept, there[name] + more, allowed))
    return chosen
