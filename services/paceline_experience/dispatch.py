"""Lease streams: the episodes of all jobs, fairly, to every worker that has room for them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from paceline.types import Assignment, Progress, Purpose
from paceline_experience.core import Signal
from paceline_experience.ledger import EpisodeKey
from paceline_experience.ledgers import Entry, Ledgers, runnable


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


@dataclass(frozen=True, slots=True)
class Handout:
    """What a worker is to run, and to stop."""

    assignments: Sequence[Assignment] = ()
    abort: Sequence[JobKey] = ()


def job_of(group_id: str) -> str:
    """The job of a group: its name up to the first dot, which no job id contains."""
    return group_id.partition(".")[0]


class Dispatcher:
    """Serves lease streams; the jobs take turns."""

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._turn = 0

    async def serve(self, messages: AsyncIterator[Told]) -> AsyncIterator[Handout]:
        """Hand out until the worker has closed its side.

        Leases of a stream that breaks are left to expire: the worker may come back with progress.
        """
        session = _Session(self._ledgers)
        self._ledgers.listeners.add(session.news)
        reader = asyncio.create_task(session.read(messages), name="lease reader")
        try:
            while True:
                event = session.news.event()
                handout = await self._next(session)
                if handout is not None:
                    yield handout
                elif reader.done():
                    reader.result()
                    return
                else:
                    await event.wait()
        finally:
            self._ledgers.listeners.discard(session.news)
            reader.cancel()

    async def _next(self, session: _Session) -> Handout | None:
        abort, session.abort = session.abort, []
        entries = runnable(self._ledgers.active.values(), session.environments)
        assignments: list[Assignment] = []
        if entries and session.has_room and not session.closed:
            self._turn += 1
            start = self._turn % len(entries)
            assignments = await session.lease([*entries[start:], *entries[:start]])
        return Handout(assignments, abort) if assignments or abort else None


@dataclass(slots=True)
class _Session:
    ledgers: Ledgers
    news: Signal = field(default_factory=Signal)
    worker_id: str = ""
    train: int = 0  # credits left
    evals: int = 0
    environments: frozenset[str] = frozenset()
    abort: list[JobKey] = field(default_factory=list[JobKey])
    closed: bool = False

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
            self.news.fire()

    async def lease(self, entries: Sequence[Entry]) -> list[Assignment]:
        """Even shares first; then whoever has more may fill what is left."""
        found: list[Assignment] = []
        for left in range(len(entries), 0, -1):
            entry = entries[-left]
            size = entry.spec.experience.group_size
            train = min(self.train, max(-(-self.train // left), size))
            found += await self._lease(entry, train, -(-self.evals // left))
        if len(entries) > 1:
            for entry in entries:
                found += await self._lease(entry, self.train, self.evals)
        return found

    async def _lease(self, entry: Entry, train: int, evals: int) -> list[Assignment]:
        if train <= 0 and evals <= 0:
            return []
        got = await entry.ledger.lease(worker_id=self.worker_id, train=train, evals=evals)
        for assignment in got:
            if assignment.purpose is Purpose.EVAL:
                self.evals -= len(assignment.indices)
            else:
                self.train -= len(assignment.indices)
        return got

    async def _take_in(self, told: Told) -> None:
        self.worker_id = told.worker_id or self.worker_id
        self.environments = frozenset(told.environments) or self.environments
        if told.renew or told.progress:
            await self._renew(told)
        for job_id, keys in _by_job(told.give_back).items():
            if entry := self.ledgers.active.get(job_id):
                await entry.ledger.give_back(worker_id=self.worker_id, keys=keys)
        self.train += told.credits
        self.evals += told.eval_credits

    async def _renew(self, told: Told) -> None:
        progress: defaultdict[str, list[Progress]] = defaultdict(list)
        for item in told.progress:
            progress[job_of(item.group_id)].append(item)
        keys = _by_job(told.renew)
        for job_id in {*progress, *keys}:
            entry = self.ledgers.active.get(job_id)
            if entry is None:
                lost = [*keys.get(job_id, ()), *map(_key, progress.get(job_id, ()))]
            else:
                lost = await entry.ledger.renew(
                    worker_id=self.worker_id,
                    keys=keys.get(job_id, ()),
                    progress=progress.get(job_id, ()),
                )
            self.abort += [JobKey(job_id, key) for key in lost]


def _by_job(keys: Sequence[JobKey]) -> dict[str, list[EpisodeKey]]:
    found: dict[str, list[EpisodeKey]] = {}
    for each in keys:
        found.setdefault(each.job_id, []).append(each.key)
    return found


def _key(progress: Progress) -> EpisodeKey:
    return EpisodeKey(progress.group_id, progress.index, progress.attempt)
