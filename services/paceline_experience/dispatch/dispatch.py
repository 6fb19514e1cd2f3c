"""Lease streams: leases the episodes of all jobs, fairly, to every worker with free slots."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.config.quota import Quota
from paceline.enums import GiveBackReason, Purpose
from paceline.errors import StoreError
from paceline.front.api.tenants import room
from paceline.platform.telemetry.logs import Log
from paceline.types import Assignment, EpisodeProgress
from paceline_experience.dispatch.fair import Claim, SlotGrant, TenantShare, allot
from paceline_experience.dispatch.presence import Presence
from paceline_experience.dispatch.slots import SlotAccounting, SlotReservation
from paceline_experience.jobs.ledgers import Ledgers, OpenLedger
from paceline_experience.ledger.ledger import Demand, EpisodeKey
from paceline_experience.store.signal import Signal

log = Log("dispatch")
_MIN_GROUPS_PER_WORKER = 4  # a group is large if fewer of them fit into a worker


@dataclass(frozen=True, slots=True)
class JobKey:
    """A lease and the job that it belongs to."""

    job_id: str
    key: EpisodeKey


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One message of a worker."""

    worker_id: str
    credits: int = 0
    eval_credits: int = 0
    progress: Sequence[EpisodeProgress] = ()
    renew: Sequence[JobKey] = ()
    give_back: Sequence[JobKey] = ()
    environments: Sequence[str] = ()
    renew_is_complete: bool = False
    """`renew` names every episode of the worker; all other leases of it are lost."""


@dataclass(frozen=True, slots=True)
class LeaseDelta:
    """Episodes that a worker must start, and those that it must abort."""

    assignments: Sequence[Assignment] = ()
    abort: Sequence[JobKey] = ()


def job_id_of(group_id: str) -> str:
    """The job of a group: its name up to the first dot, which no job id contains."""
    return group_id.partition(".")[0]


class QuotaSource(Protocol):
    """Quotas of tenants, and the usage that ledgers do not count."""

    def quota(self, tenant: str) -> Quota:
        """The quota of a tenant."""
        ...

    def leased_elsewhere(self, tenant: str) -> int:
        """Leased episodes that no ledger of this process counts."""
        ...

    def stored_bytes(self, tenant: str) -> int:
        """Size of a tenant's trajectories in the store."""
        ...


@dataclass(frozen=True, slots=True)
class _Order:
    """Slots to lease to a worker from one job."""

    entry: OpenLedger
    evals: int
    train: int
    allow_partial: bool
    reservation: SlotReservation


class Dispatcher:
    """Serves lease streams; `fair` decides who gets a worker's free slots."""

    def __init__(
        self,
        ledgers: Ledgers,
        *,
        accounting: SlotAccounting,
        quotas: QuotaSource,
        presence: Presence,
    ) -> None:
        self._ledgers = ledgers
        self._presence = presence
        self._accounting = accounting
        self._quotas = quotas

    async def serve(self, messages: AsyncIterator[WorkerReport]) -> AsyncIterator[LeaseDelta]:
        """Lease episodes until the worker closes its side or opens another stream.

        Leases of a broken stream are kept for a while: the worker may reconnect.
        """
        session = _Session(self._ledgers, self._presence)
        self._ledgers.listeners.add(session.wakeup)
        reader = asyncio.create_task(session.read(messages), name="lease reader")
        try:
            while True:
                event = session.wakeup.event()
                delta = await self._next_delta(session)
                if session.dismissed:
                    await session.return_leases(delta)
                    return
                if delta is not None:
                    yield delta
                elif session.failure is not None:
                    raise session.failure
                elif reader.done():
                    reader.result()
                    return
                else:
                    await event.wait()
        finally:
            self._ledgers.listeners.discard(session.wakeup)
            self._presence.leave(session)
            reader.cancel()

    async def _next_delta(self, session: _Session) -> LeaseDelta | None:
        abort, session.abort = session.abort, []
        for job_id, entry in self._ledgers.active.items():
            abort += [JobKey(job_id, key) for key in entry.ledger.recalled(session.worker_id)]
        assignments: list[Assignment] = []
        exhausted: set[str] = set()  # jobs that had fewer episodes than expected
        try:
            while session.has_credits and not session.closed and session.failure is None:
                await self._accounting.settle()
                orders = self._orders(session, exhausted)
                if not orders:
                    break
                assignments += await self._fill(session, orders, exhausted)
        except StoreError as error:
            session.failure = error
        return LeaseDelta(assignments, abort) if assignments or abort else None

    async def _fill(
        self, session: _Session, orders: Sequence[_Order], exhausted: set[str]
    ) -> list[Assignment]:
        found: list[Assignment] = []
        try:
            for order in orders:
                job_id = order.entry.job.status.job_id
                got: list[Assignment] = []
                with self._ledgers.isolate("cannot lease", job_id), order.reservation:
                    got = await session.lease(order)
                found += got
                if sum(len(each.indices) for each in got) < order.evals + order.train:
                    exhausted.add(job_id)
        except StoreError as error:
            session.failure = error
        finally:
            for order in orders:
                order.reservation.cancel()
        return found

    def _orders(self, session: _Session, exhausted: set[str]) -> list[_Order]:
        """Plan and reserve without awaiting, so that the counts hold until the end."""
        wanted = _runnable(self._ledgers.active.values(), session.environments)
        entries = {e.job.status.job_id: e for e in wanted if e.job.status.job_id not in exhausted}
        bids = {job_id: self._bid(entry, session) for job_id, entry in entries.items()}
        capacity = session.train + sum(bid.held for bid in bids.values())
        in_flight = self._accounting.by_tenant()
        evals = allot(
            session.evals,
            (bid.evals for bid in bids.values()),
            self._tenant_shares(bids, in_flight),
        )
        train = allot(
            session.train,
            (bid.train(capacity) for bid in bids.values()),
            self._tenant_shares(bids, in_flight, evals),
        )
        none = SlotGrant(0)
        return [
            self._order(entries[job_id], evals.get(job_id, none), train.get(job_id, none))
            for job_id in dict.fromkeys([*evals, *train])
        ]

    def _order(self, entry: OpenLedger, evals: SlotGrant, train: SlotGrant) -> _Order:
        reservation = self._accounting.reserve(entry.job.status.job_id, evals.slots + train.slots)
        return _Order(entry, evals.slots, train.slots, train.partial, reservation)

    def _bid(self, entry: OpenLedger, session: _Session) -> _Bid:
        tenant, demand = entry.job.status.tenant, entry.ledger.leases.demand()
        limit = self._quotas.quota(tenant).stored_bytes
        if room(limit, self._quotas.stored_bytes(tenant)) == 0:
            demand = replace(demand, new=0)
        return _Bid(
            job_id=entry.job.status.job_id,
            tenant=tenant,
            demand=demand,
            reserved=self._accounting.reserved(entry.job.status.job_id),
            group=demand.group,
            held=entry.ledger.held(session.worker_id),
        )

    def _tenant_shares(
        self,
        bids: Mapping[str, _Bid],
        in_flight: Counter[str],
        evals: Mapping[str, SlotGrant] | None = None,
    ) -> dict[str, TenantShare]:
        """Shares for evals, or for training on top of the evals that are already granted."""
        granted: Counter[str] = Counter()
        for job_id, grant in (evals or {}).items():
            granted[bids[job_id].tenant] += grant.slots
        found: dict[str, TenantShare] = {}
        holds: Counter[str] = Counter()
        for bid in bids.values():
            holds[bid.tenant] += bid.evals.holds if evals is None else bid.holds
        for tenant in holds:
            quota = self._quotas.quota(tenant)
            used = in_flight[tenant] + granted[tenant] + self._quotas.leased_elsewhere(tenant)
            found[tenant] = TenantShare(quota.weight, holds[tenant], room(quota.episodes, used))
        return found


@dataclass(frozen=True, slots=True)
class _Bid:
    """What a job holds and could use, seen from a worker that holds `held` of its episodes."""

    job_id: str
    tenant: str
    demand: Demand
    reserved: int
    group: int
    held: int

    @property
    def holds(self) -> int:
        """Slots that it has for training, including reserved ones."""
        return self.demand.leased + self.reserved

    @property
    def evals(self) -> Claim:
        """Its claim to eval slots, which are separate."""
        return Claim(
            self.job_id, self.tenant, holds=self.demand.eval_leased, queued=self.demand.eval_queued
        )

    def train(self, capacity: int) -> Claim:
        """Its claim to training slots of a worker with `capacity` slots in all.

        A large group may start in part: it would wait too long for an empty worker.
        """
        return Claim(
            self.job_id,
            self.tenant,
            holds=self.holds,
            queued=self.demand.queued,
            new=self.demand.new,
            group=self.group,
            allow_partial=self.held == 0 or _MIN_GROUPS_PER_WORKER * self.group > capacity,
        )


@dataclass(slots=True)
class _Session:
    ledgers: Ledgers
    presence: Presence
    wakeup: Signal = field(default_factory=Signal)
    worker_id: str = ""
    train: int = 0  # credits left
    evals: int = 0
    environments: frozenset[str] = frozenset()
    abort: list[JobKey] = field(default_factory=list[JobKey])
    closed: bool = False
    dismissed: bool = False
    failure: StoreError | None = None
    """The store is unreachable: the stream ends with this error after sending what was leased.

    On its next stream the worker reports what it has, which settles leases whose answer was lost.
    """

    def dismiss(self) -> None:
        """Lease nothing more, and end the stream."""
        self.closed = self.dismissed = True
        self.wakeup.fire()

    @property
    def has_credits(self) -> bool:
        return self.train > 0 or self.evals > 0

    async def read(self, messages: AsyncIterator[WorkerReport]) -> None:
        try:
            async for report in messages:
                await self._apply(report)
                self.wakeup.fire()
        finally:
            self.closed = True
            self.presence.leave(self)
            self.wakeup.fire()

    async def lease(self, order: _Order) -> list[Assignment]:
        got = await order.entry.ledger.leases.lease(
            worker_id=self.worker_id,
            train=order.train,
            evals=order.evals,
            allow_partial=order.allow_partial,
        )
        for assignment in got:
            if assignment.purpose is Purpose.EVAL:
                self.evals -= len(assignment.indices)
            else:
                self.train -= len(assignment.indices)
        return got

    async def return_leases(self, delta: LeaseDelta | None) -> None:
        """Return what was leased for a stream that has ended before it was sent."""
        for each in delta.assignments if delta else ():
            keys = [
                EpisodeKey(each.group_id, index, attempt, GiveBackReason.DRAIN)
                for index, attempt in zip(each.indices, each.attempts, strict=True)
            ]
            await self._give_back(each.job_id, keys)

    async def _apply(self, report: WorkerReport) -> None:
        if report.worker_id and not self.dismissed:
            self.worker_id = report.worker_id
            self.presence.enter(self)
        self.environments = frozenset(report.environments) or self.environments
        if report.renew or report.progress:
            await self._renew(report)
        for job_id, keys in _by_job(report.give_back).items():
            await self._give_back(job_id, keys)
        if report.renew_is_complete:
            await self._reconcile(_by_job(report.renew))
        self.train += report.credits
        self.evals += report.eval_credits

    async def _give_back(self, job_id: str, keys: Sequence[EpisodeKey]) -> None:
        with self.ledgers.isolate("cannot return leases", job_id):
            if entry := self.ledgers.active.get(job_id):
                await entry.ledger.give_back(worker_id=self.worker_id, keys=keys)

    async def _reconcile(self, held: Mapping[str, Sequence[EpisodeKey]]) -> None:
        """Requeue what the worker does not have: it has restarted, or an assignment was lost."""
        worker_id = self.worker_id
        for job_id, entry in list(self.ledgers.active.items()):
            if not entry.ledger.held(worker_id):
                continue
            with self.ledgers.isolate("cannot requeue leases", job_id):
                keep = held.get(job_id, ())
                released = await entry.ledger.leases.release(worker_id, keep=keep)
                if released:
                    log.info("requeued leases", worker=worker_id, job=job_id, episodes=released)

    async def _renew(self, report: WorkerReport) -> None:
        progress: defaultdict[str, list[EpisodeProgress]] = defaultdict(list)
        for item in report.progress:
            progress[job_id_of(item.group_id)].append(item)
        keys = _by_job(report.renew)
        for job_id in {*progress, *keys}:
            with self.ledgers.isolate("cannot renew", job_id):
                lost = await self._renew_job(job_id, keys.get(job_id, ()), progress.get(job_id, ()))
                self.abort += [JobKey(job_id, key) for key in lost]

    async def _renew_job(
        self, job_id: str, keys: Sequence[EpisodeKey], progress: Sequence[EpisodeProgress]
    ) -> list[EpisodeKey]:
        """What the worker must abort."""
        entry = self.ledgers.active.get(job_id)
        if entry is None:
            return [*keys, *map(_key, progress)]
        return await entry.ledger.renew(worker_id=self.worker_id, keys=keys, progress=progress)


def _by_job(keys: Sequence[JobKey]) -> dict[str, list[EpisodeKey]]:
    found: dict[str, list[EpisodeKey]] = {}
    for each in keys:
        found.setdefault(each.job_id, []).append(each.key)
    return found


def _key(progress: EpisodeProgress) -> EpisodeKey:
    return EpisodeKey(progress.group_id, progress.index, progress.attempt)


def _runnable(entries: Iterable[OpenLedger], environments: frozenset[str]) -> list[OpenLedger]:
    """Jobs whose environment a worker can run; an empty set means all.

    Every worker can run an environment that came with its job.
    """
    return [
        each
        for each in entries
        if not environments
        or each.spec.has_own_environment
        or each.spec.tasks.environment in environments
    ]
