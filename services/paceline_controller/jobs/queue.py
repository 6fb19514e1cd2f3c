"""Decides which queued jobs start, and why the others wait. Pure functions.

The tenant with the lowest weighted usage comes first, with its oldest job. Smaller jobs may pass a
job that does not fit, but not for ever: after `backfill_after_s` its capacity is reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.config.service import ControllerOptions
from paceline.enums import JobState
from paceline.front.api.tenants import Tenant
from paceline_controller.jobs.placements import NO_DEVICES, DeviceRoom
from paceline_controller.jobs.plan import LiveJob, fixed_rollouts, pools_of

Held = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class PoolClaim:
    """Rollout workers in a pool that a queued job waits for."""

    job_id: str
    tenant: str
    pool: str
    workers: int
    pressing: bool  # it has waited for longer than `backfill_after_s`


@dataclass(frozen=True, slots=True)
class Queue:
    """Jobs to start, why each of the others waits, and claims of those that only lack capacity."""

    starts: tuple[str, ...] = ()
    waits: Mapping[str, str] = field(default_factory=dict[str, str])
    claims: tuple[PoolClaim, ...] = ()


def schedule(
    jobs: Iterable[LiveJob],
    held: Held,
    tenants: Mapping[str, Tenant],
    options: ControllerOptions,
    devices: DeviceRoom = NO_DEVICES,
) -> Queue:
    """Schedule queued jobs; `held` are rollout workers of started jobs by job and pool."""
    known = list(jobs)
    room = _Room(known, held, tenants, options, devices)
    queues = _queues(known)
    positions = {job.job_id: n for queue in queues.values() for n, job in enumerate(queue, 1)}
    starts: list[str] = []
    waits: dict[str, str] = {}
    claims: list[PoolClaim] = []
    left = {name: list(reversed(queue)) for name, queue in queues.items()}

    def turn(name: str) -> tuple[float, float, str]:
        return room.share(name), -left[name][-1].age_s, name

    for name in sorted(left, key=turn):
        room.guard(queues[name])
    while left:
        name = min(left, key=turn)
        job = left[name].pop()
        if why := room.lacks(job):
            place = f"position {positions[job.job_id]} of {len(queues[name])} of tenant {name!r}"
            waits[job.job_id] = f"waits in {place}: {why.text}"
            claims += why.claims
            room.keep(job, why)
        else:
            starts.append(job.job_id)
            room.start(job)
        if not left[name]:
            del left[name]
    return Queue(tuple(starts), waits, tuple(claims))


def needs(job: LiveJob) -> int:
    """Minimum of rollout workers for a job to start."""
    bounds = job.spec.rollout.scaling
    return fixed_rollouts(job.spec) if bounds is None else max(1, bounds.min_replicas)


def _queues(jobs: Iterable[LiveJob]) -> dict[str, list[LiveJob]]:
    """Queued jobs by tenant, the oldest first."""
    by_tenant: dict[str, list[LiveJob]] = {}
    waiting = (job for job in jobs if job.state is JobState.QUEUED)
    for job in sorted(waiting, key=lambda queued: (-queued.age_s, queued.job_id)):
        by_tenant.setdefault(job.spec.tenant, []).append(job)
    return by_tenant


@dataclass(frozen=True, slots=True)
class _Lack:
    """The reason why a job waits: quota for jobs or workers, workers of its pools, or GPUs."""

    of: str
    text: str
    possible: bool = True
    claims: tuple[PoolClaim, ...] = ()


class _Room:
    """Free capacity, while jobs are admitted one by one."""

    def __init__(
        self,
        jobs: Iterable[LiveJob],
        held: Held,
        tenants: Mapping[str, Tenant],
        options: ControllerOptions,
        devices: DeviceRoom,
    ) -> None:
        self._devices = devices
        self._first_for_devices = ""  # the job that others may not pass
        self._tenants = tenants
        self._options = options
        self._jobs: Counter[str] = Counter()
        self._workers: Counter[str] = Counter()
        self._kept: set[str] = set()  # tenants whose quota is reserved for one of their jobs
        self._guarded: dict[str, LiveJob] = {}  # by pool, the job that smaller ones may not pass
        self._episodes = Counter({name: tenant.usage.episodes for name, tenant in tenants.items()})
        self._free = Counter({name: pool.max_replicas for name, pool in options.pools.items()})
        for job in jobs:
            if job.state is not JobState.QUEUED:
                self._jobs[job.spec.tenant] += 1
                self._take(job, held.get(job.job_id, {}))

    def share(self, tenant: str) -> float:
        """The tenant's dominant share of usage, divided by its weight."""
        shares = (
            used[tenant] / used.total()
            for used in (self._workers, self._episodes)
            if used.total() > 0
        )
        return max(shares, default=0.0) / self._tenant(tenant).quota.weight

    def lacks(self, job: LiveJob) -> _Lack | None:
        """Why a job cannot start; None if it can."""
        tenant, need = job.spec.tenant, needs(job)
        quota = self._tenant(tenant).quota
        jobs, workers, limit = self._jobs[tenant], self._workers[tenant], quota.rollout_workers
        if quota.jobs is not None and jobs >= quota.jobs:
            return _Lack("jobs", f"quota jobs: {jobs} of {quota.jobs} run")
        if limit is not None and need > limit:
            text = f"it needs {need} rollout workers, and quota rollout_workers is {limit}"
            return _Lack("workers", text, possible=False)
        if limit is not None and (workers + need > limit or tenant in self._kept):
            text = f"quota rollout_workers: {workers} of {limit} are in use, and it needs {need}"
            return _Lack("workers", text)
        return self._lacks_pool(job, need) or self._lacks_devices(job)

    def start(self, job: LiveJob) -> None:
        """Subtract what the job needs."""
        self._jobs[job.spec.tenant] += 1
        self._devices.take(job)
        self._take(job, self._split_over_pools(job, needs(job)))
        self._guarded = {
            n: first for n, first in self._guarded.items() if first.job_id != job.job_id
        }

    def keep(self, job: LiveJob, lack: _Lack) -> None:
        """Reserve for the first job that waited too long: its tenant's remaining quota, or GPUs."""
        if not self._pressing(job) or not lack.possible:
            return
        if lack.of == "workers":
            self._kept.add(job.spec.tenant)
        elif lack.of == "devices":
            self._first_for_devices = self._first_for_devices or job.job_id

    def guard(self, queue: Iterable[LiveJob]) -> None:
        """Reserve each pool for the first job that waited too long and lacks only its capacity."""
        for job in queue:
            lack = self.lacks(job)
            if self._pressing(job) and (lack is None or (lack.of == "pool" and lack.possible)):
                for pool in self._pools(job):
                    self._guarded.setdefault(pool, job)
                return

    def _pressing(self, job: LiveJob) -> bool:
        return job.age_s >= self._options.backfill_after_s

    def _lacks_pool(self, job: LiveJob, need: int) -> _Lack | None:
        pools = self._pools(job)
        free = sum(self._left(pool, job, need) for pool in pools)
        if free >= need:
            return None
        limit = sum(self._options.pools[pool].max_replicas for pool in pools)
        names = ", ".join(pools)
        if need > limit:
            text = f"it needs {need} rollout workers, and pool {names} has {limit} at most"
            return _Lack("pool", text, possible=False)
        claim = PoolClaim(job.job_id, job.spec.tenant, pools[0], need, self._pressing(job))
        text = f"it needs {need} rollout workers, and {free} of {limit} are free in pool {names}"
        return _Lack("pool", text, claims=(claim,))

    def _lacks_devices(self, job: LiveJob) -> _Lack | None:
        first = self._first_for_devices
        if first not in ("", job.job_id) and self._devices.wants_any(job):
            return _Lack("devices", f"GPUs are kept for job {first}, which has waited for longer")
        lack = self._devices.lack(job)
        return None if lack is None else _Lack("devices", lack.text, possible=lack.possible)

    def _left(self, pool: str, job: LiveJob, need: int) -> int:
        """Free workers of a pool for a job, without those reserved for a larger one."""
        first = self._guarded.get(pool)
        guarded = first is not None and first.job_id != job.job_id and needs(first) > need
        return max(0, self._free[pool] - (needs(first) if first and guarded else 0))

    def _pools(self, job: LiveJob) -> list[str]:
        """Pools for its first workers; a job that is not scaled uses only one."""
        pools = pools_of(job.spec, self._options)
        return pools[:1] if job.spec.rollout.scaling is None else pools

    def _split_over_pools(self, job: LiveJob, need: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for pool in self._pools(job):
            counts[pool] = min(need, self._left(pool, job, need))
            need -= counts[pool]
        return counts

    def _take(self, job: LiveJob, counts: Mapping[str, int]) -> None:
        lacking = max(0, needs(job) - sum(counts.values())) if job.state in _GROWING else 0
        for pool, count in counts.items():
            self._free[pool] -= count
        if lacking:
            self._free[self._pools(job)[0]] -= lacking
        self._workers[job.spec.tenant] += sum(counts.values()) + lacking

    def _tenant(self, name: str) -> Tenant:
        return self._tenants.get(name) or Tenant(name)


# States in which a job still gets the workers missing from its minimum.
_GROWING = frozenset({JobState.STARTING, JobState.RUNNING})
