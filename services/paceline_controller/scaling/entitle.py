"""Divides an oversubscribed pool fairly among jobs. No side effects."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from paceline_controller.jobs.queue import PoolClaim


@dataclass(frozen=True, slots=True)
class WorkerDemand:
    """Workers that a job or tenant must have, has, and wants."""

    floor: int = 0
    held: int = 0
    wish: int = 0
    weight: float = 1.0

    def __add__(self, other: WorkerDemand) -> WorkerDemand:
        return WorkerDemand(
            self.floor + other.floor, self.held + other.held, self.wish + other.wish, self.weight
        )


def fill(total: int, wants: Mapping[str, WorkerDemand]) -> dict[str, int]:
    """Share out `total` workers: floors first, then one by one to the least served by weight.

    Weighted max-min fairness in whole workers; floors are given even where they exceed `total`.
    """
    shares = {name: want.floor for name, want in wants.items()}
    left = total - sum(shares.values())
    turns = [(shares[n] / want.weight, n) for n, want in wants.items() if shares[n] < want.wish]
    heapq.heapify(turns)
    while left > 0 and turns:
        _, name = heapq.heappop(turns)
        shares[name] += 1
        left -= 1
        if shares[name] < wants[name].wish:
            heapq.heappush(turns, (shares[name] / wants[name].weight, name))
    return shares


def entitled(
    total: int,
    jobs: Mapping[str, WorkerDemand],
    owners: Mapping[str, str],
    claims: Iterable[PoolClaim],
    weights: Mapping[str, float],
) -> dict[str, int]:
    """The most that each job may hold in a pool of `total`, by the shares of their tenants.

    A queued job counts only if all that it waits for fits into the share of its tenant: a part of
    it would be useless. Pressing ones have it counted as a floor.
    """
    tenants = {name: WorkerDemand(weight=weights.get(name, 1.0)) for name in {*owners.values()}}
    for job_id, want in jobs.items():
        tenants[owners[job_id]] += want
    reserved: Counter[str] = Counter()
    for claim in claims:
        before = tenants.get(claim.tenant, WorkerDemand(weight=weights.get(claim.tenant, 1.0)))
        floor = claim.workers if claim.pressing else 0
        trial = tenants | {claim.tenant: before + WorkerDemand(floor=floor, wish=claim.workers)}
        kept = reserved + Counter({claim.tenant: claim.workers})
        if _suffices(total, trial, jobs, owners, kept):
            tenants, reserved = trial, kept
    shares = fill(total, tenants)
    spare = max(0, total - sum(shares.values()))
    entitlements: dict[str, int] = {}
    for name, share in shares.items():
        mine = {job_id: want for job_id, want in jobs.items() if owners[job_id] == name}
        entitlements |= _within(share + spare - reserved[name], mine)
    return entitlements


def _suffices(
    total: int,
    tenants: Mapping[str, WorkerDemand],
    jobs: Mapping[str, WorkerDemand],
    owners: Mapping[str, str],
    reserved: Counter[str],
) -> bool:
    """Whether all shares cover the floors of running jobs and the reservations of queued ones."""
    must = Counter(reserved)
    for job_id, want in jobs.items():
        must[owners[job_id]] += want.floor
    shares = fill(total, tenants)
    fits = sum(want.floor for want in tenants.values()) <= total
    return fits and all(shares[name] >= must[name] for name in reserved)


def _within(limit: int, jobs: Mapping[str, WorkerDemand]) -> dict[str, int]:
    """Limits for one tenant's jobs: they keep their workers if all fit; else the largest shrink."""
    held = sum(want.held for want in jobs.values())
    if held <= limit:
        return {job_id: want.held + limit - held for job_id, want in jobs.items()}
    return fill(limit, {n: replace(want, wish=want.held, weight=1.0) for n, want in jobs.items()})
