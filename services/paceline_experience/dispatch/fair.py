"""Who gets a worker's free slots: tenants by weight, then the jobs of a tenant. Pure functions.

Whoever holds the smallest share of slots gets the next ones. So slots are shared evenly, not
episodes: a tenant whose episodes are slow gets fewer of them done.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """Slots that a job holds and could use."""

    job_id: str
    tenant: str
    holds: int  # slots, on all workers
    queued: int  # episodes that can be leased one by one
    new: int = 0  # episodes that would be admitted, in whole groups
    group: int = 1  # episodes per group
    allow_partial: bool = False  # a new group may start with fewer


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Slots that a tenant holds, and how many more it may have; None: any number."""

    weight: float = 1.0
    holds: int = 0
    room: int | None = None


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """Slots for a job; `partial`: its last new group may start with fewer episodes than it has."""

    slots: int
    partial: bool = False


def allot(
    slots: int, claims: Iterable[Claim], shares: Mapping[str, TenantShare]
) -> dict[str, SlotGrant]:
    """Divide `slots` free slots of a worker; returns grants by job.

    New groups are granted whole. If the next group in turn does not fit, the remaining slots are
    kept for it: otherwise small groups would take every slot that becomes free. It starts in part
    if its claim allows that, or if the tenant's own limit is what is too small.
    """
    grants: dict[str, SlotGrant] = {}
    queue = _tenants(claims, shares)
    while slots > 0 and queue:
        tenant = heapq.heappop(queue)
        job = heapq.heappop(tenant.jobs)
        size, partial = job.next_piece(slots, tenant.room)
        if size == 0:
            break
        slots -= size
        job.take(size)
        tenant.granted += size
        tenant.room -= size
        grants[job.claim.job_id] = SlotGrant(job.granted, partial)
        if job.wants:
            heapq.heappush(tenant.jobs, job)
        if tenant.jobs and tenant.room > 0:
            heapq.heappush(queue, tenant)
    return grants


@dataclass(slots=True)
class _JobDemand:
    claim: Claim
    queued: int
    new: int
    granted: int = 0

    def __lt__(self, other: _JobDemand) -> bool:
        return self._priority() < other._priority()

    @property
    def wants(self) -> bool:
        return self.queued > 0 or self.new > 0

    def next_piece(self, slots: int, room: int) -> tuple[int, bool]:
        """The next slots to grant, and whether they start a group in part; 0: keep them free."""
        group = self.claim.group
        if self.queued:
            return min(self.queued, group, slots, room), False
        size = min(group, self.new)
        if size <= min(slots, room):
            return size, False
        if room <= slots:
            return room, True
        return (slots, True) if self.claim.allow_partial and not self.granted else (0, False)

    def take(self, size: int) -> None:
        """Grant slots; a group that starts in part is the last one for now."""
        self.granted += size
        if self.queued:
            self.queued -= size
        else:
            self.new = self.new - size if size >= self.claim.group else 0

    def _priority(self) -> tuple[int, str]:
        return self.claim.holds + self.granted, self.claim.job_id


@dataclass(slots=True)
class _Tenant:
    name: str
    share: TenantShare
    room: int
    jobs: list[_JobDemand]
    granted: int = 0

    def __lt__(self, other: _Tenant) -> bool:
        return self._priority() < other._priority()

    def _priority(self) -> tuple[float, str]:
        return (self.share.holds + self.granted) / self.share.weight, self.name


def _tenants(claims: Iterable[Claim], shares: Mapping[str, TenantShare]) -> list[_Tenant]:
    """Tenants that have demand and are within their quota, as a heap."""
    found: dict[str, _Tenant] = {}
    for claim in claims:
        job = _JobDemand(claim, claim.queued, claim.new)
        share = shares.get(claim.tenant, TenantShare())
        room = sys.maxsize if share.room is None else share.room
        if not job.wants or room <= 0:
            continue
        tenant = found.setdefault(claim.tenant, _Tenant(claim.tenant, share, room, []))
        heapq.heappush(tenant.jobs, job)
    queue = list(found.values())
    heapq.heapify(queue)
    return queue
