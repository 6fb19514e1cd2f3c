"""Which queued jobs start, and why the others wait. Pure.

The tenant that uses least, for its weight, comes first; of a tenant the oldest job. A job that
does not fit lets smaller ones pass, but not for ever: after `patience_s` they leave it the room
that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.config.service import ControllerOptions
from paceline.tenants import Tenant
from paceline.types import JobState
from paceline_controller.plan import LiveJob, pools_of

Held = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class PoolClaim:
    """Rollout workers in a pool that a queued job waits for."""

    job_id: str
    tenant: str
    pool: str
    workers: int
    pressing: bool  # it has waited for longer than `patience_s`


@dataclass(frozen=True, slots=True)
class Queue:
    """Jobs that start, why each of the others waits, and those that wait for nothing but room."""

    starts: tuple[str, ...] = ()
    waits: Mapping[str, str] = field(default_factory=dict[str, str])
    claims: tuple[PoolClaim, ...] = ()


def look(
    jobs: Iterable[LiveJob],
    held: Held,
    tenants: Mapping[str, Tenant],
    options: ControllerOptions,
) -> Queue:
    """The queue at this moment; `held` are rollout workers by job and pool, of started jobs."""
    known = list(jobs)
    room = _Room(known, held, tenants, options)
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
    """Rollout workers without which a job does not start."""
    bounds = job.spec.rollout.scaling
    return job.spec.rollout.replicas if bounds is None else max(1, bounds.min_replicas)


def _queues(jobs: Iterable[LiveJob]) -> dict[str, list[LiveJob]]:
    """Queued jobs by tenant, the oldest first."""
    found: dict[str, list[LiveJob]] = {}
    waiting = (job for job in jobs if job.state is JobState.QUEUED)
    for job in sorted(waiting, key=lambda each: (-each.age_s, each.job_id)):
        found.setdefault(job.spec.tenant, []).append(job)
    return found


@dataclass(frozen=True, slots=True)
class _Lack:
    """What a job waits for: jobs or workers of its tenant, or workers of its pools."""

    of: str
    text: str
    possible: bool = True
    claims: tuple[PoolClaim, ...] = ()


class _Room:
    """What is left, as jobs are let in one by one."""

    def __init__(
        self,
        jobs: Iterable[LiveJob],
        held: Held,
        tenants: Mapping[str, Tenant],
        options: ControllerOptions,
    ) -> None:
        self._tenants = tenants
        self._options = options
        self._jobs: Counter[str] = Counter()
        self._workers: Counter[str] = Counter()
        self._kept: set[str] = set()  # tenants whose room for workers is kept for one of their jobs
        self._guarded: dict[str, LiveJob] = {}  # by pool, who is passed by smaller ones no more
        self._episodes = Counter({name: each.use.episodes for name, each in tenants.items()})
        self._free = Counter({name: pool.max_replicas for name, pool in options.pools.items()})
        for job in jobs:
            if job.state is not JobState.QUEUED:
                self._jobs[job.spec.tenant] += 1
                self._take(job, held.get(job.job_id, {}))

    def share(self, tenant: str) -> float:
        """Its dominant share of what is in use, for its weight."""
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
        jobs, workers, most = self._jobs[tenant], self._workers[tenant], quota.rollout_workers
        if quota.jobs is not None and jobs >= quota.jobs:
            return _Lack("jobs", f"quota jobs: {jobs} of {quota.jobs} run")
        if most is not None and need > most:
            text = f"it needs {need} rollout workers, and quota rollout_workers is {most}"
            return _Lack("workers", text, possible=False)
        if most is not None and (workers + need > most or tenant in self._kept):
            text = f"quota rollout_workers: {workers} of {most} are in use, and it needs {need}"
            return _Lack("workers", text)
        return self._lacks_pool(job, need)

    def start(self, job: LiveJob) -> None:
        """It takes what it needs."""
        self._jobs[job.spec.tenant] += 1
        self._take(job, self._placed(job, needs(job)))
        self._guarded = {n: each for n, each in self._guarded.items() if each.job_id != job.job_id}

    def keep(self, job: LiveJob, lack: _Lack) -> None:
        """What the tenant may still have is for the first of its jobs that waited for too long."""
        if self._pressing(job) and lack.possible and lack.of == "workers":
            self._kept.add(job.spec.tenant)

    def guard(self, queue: Iterable[LiveJob]) -> None:
        """Of each pool the first job that waited for too long, and for nothing but room in it."""
        for job in queue:
            lack = self.lacks(job)
            if self._pressing(job) and (lack is None or (lack.of == "pool" and lack.possible)):
                for pool in self._pools(job):
                    self._guarded.setdefault(pool, job)
                return

    def _pressing(self, job: LiveJob) -> bool:
        return job.age_s >= self._options.patience_s

    def _lacks_pool(self, job: LiveJob, need: int) -> _Lack | None:
        pools = self._pools(job)
        free = sum(self._left(pool, job, need) for pool in pools)
        if free >= need:
            return None
        most = sum(self._options.pools[pool].max_replicas for pool in pools)
        names = ", ".join(pools)
        if need > most:
            text = f"it needs {need} rollout workers, and pool {names} has {most} at most"
            return _Lack("pool", text, possible=False)
        claim = PoolClaim(job.job_id, job.spec.tenant, pools[0], need, self._pressing(job))
        text = f"it needs {need} rollout workers, and {free} of {most} are free in pool {names}"
        return _Lack("pool", text, claims=(claim,))

    def _left(self, pool: str, job: LiveJob, need: int) -> int:
        """What a pool has for a job, beside what a larger one is guarded for."""
        first = self._guarded.get(pool)
        guarded = first is not None and first.job_id != job.job_id and needs(first) > need
        return max(0, self._free[pool] - (needs(first) if first and guarded else 0))

    def _pools(self, job: LiveJob) -> list[str]:
        """Where its first workers may be; those of a job that is not scaled are all in one."""
        pools = pools_of(job.spec, self._options)
        return pools[:1] if job.spec.rollout.scaling is None else pools

    def _placed(self, job: LiveJob, need: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for pool in self._pools(job):
            found[pool] = min(need, self._left(pool, job, need))
            need -= found[pool]
        return found

    def _take(self, job: LiveJob, counts: Mapping[str, int]) -> None:
        lacking = max(0, needs(job) - sum(counts.values())) if job.state in _GROWING else 0
        for pool, count in counts.items():
            self._free[pool] -= count
        if lacking:
            self._free[self._pools(job)[0]] -= lacking
        self._workers[job.spec.tenant] += sum(counts.values()) + lacking

    def _tenant(self, name: str) -> Tenant:
        return self._tenants.get(name) or Tenant(name)


# Those that get what they still lack of their least.
_GROWING = frozenset({JobState.STARTING, JobState.RUNNING})
