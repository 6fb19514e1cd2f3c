"""Who gets a worker's free slots: tenants by weight, then the jobs of a tenant. Pure.

Whoever has the smallest share of slots gets the next piece. So it is slots that are shared evenly,
not episodes: a tenant whose episodes take long makes fewer of them.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What a job could use."""

    job_id: str
    tenant: str
    holds: int  # slots, of all workers
    queued: int  # episodes that may be leased one by one
    new: int = 0  # episodes that would be admitted, in whole groups
    group: int = 1  # episodes of a group
    part: bool = False  # a new one may begin with fewer


@dataclass(frozen=True, slots=True)
class Standing:
    """How a tenant stands: slots it holds, and how many more it may have; None: any number."""

    weight: float = 1.0
    holds: int = 0
    room: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots for a job; `part`: its last new group may begin with fewer episodes than it has."""

    slots: int
    part: bool = False


def allot(
    slots: int, claims: Iterable[Claim], standings: Mapping[str, Standing]
) -> dict[str, Grant]:
    """Grants by job, of `slots` free ones of a worker.

    New groups are given whole. One of the tenant whose turn it is that does not fit keeps what is
    left for itself: otherwise small groups would take every slot that becomes free. It begins in
    part where its claim says so, and where it is the tenant's room that is too small.
    """
    given: dict[str, Grant] = {}
    turns = _tenants(claims, standings)
    while slots > 0 and turns:
        tenant = heapq.heappop(turns)
        job = heapq.heappop(tenant.jobs)
        size, part = job.piece(slots, tenant.room)
        if size == 0:
            break
        slots -= size
        job.take(size)
        tenant.given += size
        tenant.room -= size
        given[job.claim.job_id] = Grant(job.given, part)
        if job.wants:
            heapq.heappush(tenant.jobs, job)
        if tenant.jobs and tenant.room > 0:
            heapq.heappush(turns, tenant)
    return given


@dataclass(slots=True)
class _Job:
    claim: Claim
    queued: int
    new: int
    given: int = 0

    def __lt__(self, other: _Job) -> bool:
        return self._turn() < other._turn()

    @property
    def wants(self) -> bool:
        return self.queued > 0 or self.new > 0

    def piece(self, slots: int, room: int) -> tuple[int, bool]:
        """The next slots to be given, and whether they begin a group in part; 0: they are kept."""
        group = self.claim.group
        if self.queued:
            return min(self.queued, group, slots, room), False
        size = min(group, self.new)
        if size <= min(slots, room):
            return size, False
        if room <= slots:
            return room, True
        return (slots, True) if self.claim.part and not self.given else (0, False)

    def take(self, size: int) -> None:
        """A group that begins in part is the last one for now."""
        self.given += size
        if self.queued:
            self.queued -= size
        else:
            self.new = self.new - size if size >= self.claim.group else 0

    def _turn(self) -> tuple[int, str]:
        return self.claim.holds + self.given, self.claim.job_id


@dataclass(slots=True)
class _Tenant:
    name: str
    standing: Standing
    room: int
    jobs: list[_Job]
    given: int = 0

    def __lt__(self, other: _Tenant) -> bool:
        return self._turn() < other._turn()

    def _turn(self) -> tuple[float, str]:
        return (self.standing.holds + self.given) / self.standing.weight, self.name


def _tenants(claims: Iterable[Claim], standings: Mapping[str, Standing]) -> list[_Tenant]:
    """Those who want something and may have it, as a heap."""
    found: dict[str, _Tenant] = {}
    for claim in claims:
        job = _Job(claim, claim.queued, claim.new)
        standing = standings.get(claim.tenant, Standing())
        room = sys.maxsize if standing.room is None else standing.room
        if not job.wants or room <= 0:
            continue
        tenant = found.setdefault(claim.tenant, _Tenant(claim.tenant, standing, room, []))
        heapq.heappush(tenant.jobs, job)
    turns = list(found.values())
    heapq.heapify(turns)
    return turns
