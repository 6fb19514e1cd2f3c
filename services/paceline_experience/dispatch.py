"""Lease streams: the episodes of all jobs, fairly, to every worker that has room for them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.config.quota import Quota
from paceline.errors import StoreError
from paceline.logs import Log
from paceline.tenants import room
from paceline.types import Assignment, Progress, Purpose
from paceline_experience.core import Signal
from paceline_experience.fair import Claim, Grant, Standing, allot
from paceline_experience.flight import Flight, Promise
from paceline_experience.ledger import Demand, EpisodeKey
from paceline_experience.ledgers import Entry, Ledgers, runnable
from paceline_experience.presence import Presence

log = Log("dispatch")
_LARGE = 4  # a group is large if so many of them do not fit into a worker


@dataclass(frozen=True, slots=True)
class JobKey:
    """An episode's lease and the job that it belongs to."""

    job_id: str
    key: EpisodeKey


@dataclass(frozen=True, slots=True)
class Told:
    """One message of a worker."""

    worker_id: str
    credits: int = 0
    eval_credits: int = 0
    progress: Sequence[Progress] = ()
    renew: Sequence[JobKey] = ()
    give_back: Sequence[JobKey] = ()
    environments: Sequence[str] = ()
    holds_no_more: bool = False
    """`renew` names every episode that the worker has; what the ledger counts beside is lost."""


@dataclass(frozen=True, slots=True)
class Handout:
    """What a worker is to run, and to stop."""

    assignments: Sequence[Assignment] = ()
    abort: Sequence[JobKey] = ()


def job_of(group_id: str) -> str:
    """The job of a group: its name up to the first dot, which no job id contains."""
    return group_id.partition(".")[0]


class Limits(Protocol):
    """Who knows what tenants may have."""

    def quota(self, tenant: str) -> Quota:
        """What holds for a tenant."""
        ...

    def elsewhere(self, tenant: str) -> int:
        """Episodes in flight that no ledger of this process counts."""
        ...

    def stored(self, tenant: str) -> int:
        """Bytes of trajectories in the store."""
        ...


@dataclass(frozen=True, slots=True)
class _Order:
    """What a worker is to get of a job."""

    entry: Entry
    evals: int
    train: int
    part: bool
    promise: Promise


class Dispatcher:
    """Serves lease streams; `fair` says who gets a worker's free slots."""

    def __init__(
        self, ledgers: Ledgers, *, flight: Flight, limits: Limits, presence: Presence
    ) -> None:
        self._ledgers = ledgers
        self._presence = presence
        self._flight = flight
        self._limits = limits

    async def serve(self, messages: AsyncIterator[Told]) -> AsyncIterator[Handout]:
        """Hand out until the worker has closed its side, or has opened another stream.

        Leases of a stream that breaks are kept for a moment: the worker may come back.
        """
        session = _Session(self._ledgers, self._presence)
        self._ledgers.listeners.add(session.news)
        reader = asyncio.create_task(session.read(messages), name="lease reader")
        try:
            while True:
                event = session.news.event()
                handout = await self._next(session)
                if session.dismissed:
                    await session.take_back(handout)
                    return
                if handout is not None:
                    yield handout
                elif session.failure is not None:
                    raise session.failure
                elif reader.done():
                    reader.result()
                    return
                else:
                    await event.wait()
        finally:
            self._ledgers.listeners.discard(session.news)
            self._presence.leave(session)
            reader.cancel()

    async def _next(self, session: _Session) -> Handout | None:
        abort, session.abort = session.abort, []
        assignments: list[Assignment] = []
        content: set[str] = set()  # jobs that had less than it seemed
        try:
            while session.has_room and not session.closed and session.failure is None:
                await self._flight.settle()
                orders = self._orders(session, content)
                if not orders:
                    break
                assignments += await self._fill(session, orders, content)
        except StoreError as error:
            session.failure = error
        return Handout(assignments, abort) if assignments or abort else None

    async def _fill(
        self, session: _Session, orders: Sequence[_Order], content: set[str]
    ) -> list[Assignment]:
        found: list[Assignment] = []
        try:
            for order in orders:
                job_id = order.entry.job.status.job_id
                got: list[Assignment] = []
                with self._ledgers.apart("cannot lease", job_id), order.promise:
                    got = await session.lease(order)
                found += got
                if sum(len(each.indices) for each in got) < order.evals + order.train:
                    content.add(job_id)
        except StoreError as error:
            session.failure = error
        finally:
            for order in orders:
                order.promise.withdraw()
        return found

    def _orders(self, session: _Session, content: set[str]) -> list[_Order]:
        """Looks and promises without a pause, so that it is true when it is done."""
        wanted = runnable(self._ledgers.active.values(), session.environments)
        entries = {e.job.status.job_id: e for e in wanted if e.job.status.job_id not in content}
        bids = {job_id: self._bid(entry, session) for job_id, entry in entries.items()}
        capacity = session.train + sum(bid.held for bid in bids.values())
        flying = self._flight.by_tenant()
        evals = allot(
            session.evals,
            (bid.evals for bid in bids.values()),
            self._standings(bids, flying),
        )
        train = allot(
            session.train,
            (bid.train(capacity) for bid in bids.values()),
            self._standings(bids, flying, evals),
        )
        none = Grant(0)
        return [
            self._order(entries[job_id], evals.get(job_id, none), train.get(job_id, none))
            for job_id in dict.fromkeys([*evals, *train])
        ]

    def _order(self, entry: Entry, evals: Grant, train: Grant) -> _Order:
        promise = self._flight.promise(entry.job.status.job_id, evals.slots + train.slots)
        return _Order(entry, evals.slots, train.slots, train.part, promise)

    def _bid(self, entry: Entry, session: _Session) -> _Bid:
        tenant, demand = entry.job.status.tenant, entry.ledger.demand()
        most = self._limits.quota(tenant).stored_bytes
        if room(most, self._limits.stored(tenant)) == 0:
            demand = replace(demand, new=0)
        return _Bid(
            job_id=entry.job.status.job_id,
            tenant=tenant,
            demand=demand,
            promised=self._flight.promised(entry.job.status.job_id),
            group=entry.spec.experience.group_size,
            held=entry.ledger.held(session.worker_id),
        )

    def _standings(
        self,
        bids: Mapping[str, _Bid],
        flying: Counter[str],
        evals: Mapping[str, Grant] | None = None,
    ) -> dict[str, Standing]:
        """For evaluations, or for training beside the evaluations that are granted already."""
        granted: Counter[str] = Counter()
        for job_id, grant in (evals or {}).items():
            granted[bids[job_id].tenant] += grant.slots
        found: dict[str, Standing] = {}
        holds: Counter[str] = Counter()
        for bid in bids.values():
            holds[bid.tenant] += bid.evals.holds if evals is None else bid.holds
        for tenant in holds:
            quota = self._limits.quota(tenant)
            used = flying[tenant] + granted[tenant] + self._limits.elsewhere(tenant)
            found[tenant] = Standing(quota.weight, holds[tenant], room(quota.episodes, used))
        return found


@dataclass(frozen=True, slots=True)
class _Bid:
    """What a job has, and could use of a worker that holds `held` of its episodes."""

    job_id: str
    tenant: str
    demand: Demand
    promised: int
    group: int
    held: int

    @property
    def holds(self) -> int:
        """Slots for training, and those that are on their way."""
        return self.demand.leased + self.promised

    @property
    def evals(self) -> Claim:
        """Evaluations have slots of their own."""
        return Claim(
            self.job_id, self.tenant, holds=self.demand.eval_leased, queued=self.demand.eval_queued
        )

    def train(self, capacity: int) -> Claim:
        """On a worker with so many slots in all; large groups cannot wait until it is empty."""
        return Claim(
            self.job_id,
            self.tenant,
            holds=self.holds,
            queued=self.demand.queued,
            new=self.demand.new,
            group=self.group,
            part=self.held == 0 or _LARGE * self.group > capacity,
        )


@dataclass(slots=True)
class _Session:
    ledgers: Ledgers
    presence: Presence
    news: Signal = field(default_factory=Signal)
    worker_id: str = ""
    train: int = 0  # credits left
    evals: int = 0
    environments: frozenset[str] = frozenset()
    abort: list[JobKey] = field(default_factory=list[JobKey])
    closed: bool = False
    dismissed: bool = False
    failure: StoreError | None = None
    """The store has gone away; the stream ends with it when what was leased is handed out.

    The worker's next one says what it has: of a lease whose answer was lost it has nothing.
    """

    def dismiss(self) -> None:
        """Hand out nothing more, and end."""
        self.closed = self.dismissed = True
        self.news.fire()

    @property
    def has_room(self) -> bool:
        return self.train > 0 or self.evals > 0

    async def read(self, messages: AsyncIterator[Told]) -> None:
        try:
            async for told in messages:
                await self._take_in(told)
                self.news.fire()
        finally:
            self.closed = True
            self.presence.leave(self)
            self.news.fire()

    async def lease(self, order: _Order) -> list[Assignment]:
        got = await order.entry.ledger.lease(
            worker_id=self.worker_id, train=order.train, evals=order.evals, part=order.part
        )
        for assignment in got:
            if assignment.purpose is Purpose.EVAL:
                self.evals -= len(assignment.indices)
            else:
                self.train -= len(assignment.indices)
        return got

    async def take_back(self, handout: Handout | None) -> None:
        """What was leased for a stream that is over; it was never handed out."""
        for given in handout.assignments if handout else ():
            keys = [
                EpisodeKey(given.group_id, index, attempt, "drain")
                for index, attempt in zip(given.indices, given.attempts, strict=True)
            ]
            await self._give_back(given.job_id, keys)

    async def _take_in(self, told: Told) -> None:
        if told.worker_id and not self.dismissed:
            self.worker_id = told.worker_id
            self.presence.enter(self)
        self.environments = frozenset(told.environments) or self.environments
        if told.renew or told.progress:
            await self._renew(told)
        for job_id, keys in _by_job(told.give_back).items():
            await self._give_back(job_id, keys)
        if told.holds_no_more:
            await self._reconcile(_by_job(told.renew))
        self.train += told.credits
        self.evals += told.eval_credits

    async def _give_back(self, job_id: str, keys: Sequence[EpisodeKey]) -> None:
        with self.ledgers.apart("cannot take back", job_id):
            if entry := self.ledgers.active.get(job_id):
                await entry.ledger.give_back(worker_id=self.worker_id, keys=keys)

    async def _reconcile(self, held: Mapping[str, Sequence[EpisodeKey]]) -> None:
        """It may be a new process of this name; or a stream broke on which something was sent."""
        worker_id = self.worker_id
        for job_id, entry in list(self.ledgers.active.items()):
            if not entry.ledger.held(worker_id):
                continue
            with self.ledgers.apart("cannot hand out again", job_id):
                kept = held.get(job_id, ())
                released = await entry.ledger.release(worker_id=worker_id, kept=kept)
                if released:
                    log.info("hands out again", worker=worker_id, job=job_id, episodes=released)

    async def _renew(self, told: Told) -> None:
        progress: defaultdict[str, list[Progress]] = defaultdict(list)
        for item in told.progress:
            progress[job_of(item.group_id)].append(item)
        keys = _by_job(told.renew)
        for job_id in {*progress, *keys}:
            with self.ledgers.apart("cannot renew", job_id):
                lost = await self._renewed(job_id, keys.get(job_id, ()), progress.get(job_id, ()))
                self.abort += [JobKey(job_id, key) for key in lost]

    async def _renewed(
        self, job_id: str, keys: Sequence[EpisodeKey], progress: Sequence[Progress]
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


def _key(progress: Progress) -> EpisodeKey:
    return EpisodeKey(progress.group_id, progress.index, progress.attempt)
