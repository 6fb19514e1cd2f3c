"""What all verbs of the ledger share: the job's keys, its book, its lock and its signals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from paceline.config import JobSpec
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.tracing import OFF, Tracer
from paceline_experience.book import Book
from paceline_experience.clock import Clock
from paceline_experience.feed import Feed
from paceline_experience.keys import JobKeys
from paceline_experience.meter import JobMeter
from paceline_experience.quotas import JobLimits
from paceline_experience.store import Store
from paceline_experience.traces import Traces
from paceline_experience.watermarks import Watermarks

_KEEP_TIME_S = 10.0  # at most this much is not counted when the process restarts
log = Log("core")


class Hooks(Protocol):
    """What the ledger tells its surroundings."""

    async def recorded(self) -> None:
        """The history of the job may have new rows. May be told when it has none."""
        ...

    async def finished(self, *, state: str, reason: str) -> None:
        """The job is over: `succeeded` or `failed`. May be told again after a restart."""
        ...

    async def running(self) -> None:
        """The first version was announced."""
        ...

    async def went_back(self) -> None:
        """The store has lost what was written last."""
        ...


class Signal:
    """Wakes everybody who waits; take the event first, then look, then wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def event(self) -> asyncio.Event:
        """Set at the next `fire`."""
        return self._event

    def fire(self) -> None:
        """Wake all who hold the present event."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def waves(self, calm_s: float) -> AsyncIterator[None]:
        """Now and after changes; those less than `calm_s` after the last wave come as one."""
        while True:
            event = self._event
            yield
            await asyncio.sleep(calm_s)
            await event.wait()


class Core:
    """Runs scripts one at a time and keeps the book equal to what Redis holds."""

    def __init__(
        self,
        *,
        store: Store,
        keys: JobKeys,
        job_id: str,
        spec: JobSpec,
        clock: Clock,
        feed: Feed,
        limits: JobLimits | None = None,
        epoch: int = 0,
        watermarks: Watermarks | None = None,
        tracer: Tracer = OFF,
        meter: JobMeter | None = None,
    ) -> None:
        self.watermarks = watermarks or Watermarks()
        self.meter = meter or JobMeter(Metrics(), job_id)
        self.store = store
        self.keys = keys
        self.job_id = job_id
        self.spec = spec
        self.clock = clock
        self.feed = feed
        self.limits = limits or JobLimits()
        self.traces = Traces(tracer, job_id=job_id)
        self._epoch = epoch
        self.book = Book()
        self.work = Signal()  # something may be leased
        self.ready = Signal()  # a batch may be taken
        self._lock = asyncio.Lock()
        self._stale = True
        self.rows_written = 0  # into the history, as far as it is known
        self._is_back = False  # the store has gone back, and not all that follows is done
        self._went_back: Callable[[], Awaitable[None]] | None = None

    def when_back(self, work: Callable[[], Awaitable[None]]) -> None:
        """What to do, inside a transaction, when the store is older than this object's memory."""
        self._went_back = work

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Book]:
        """One writer at a time, with a book that is true."""
        async with self._lock:
            if self._stale:
                await self._reload()
            yield self.book

    async def compare(self) -> None:
        """Begin anew from the store if it has lost what this object remembers."""
        async with self._lock:
            if not self._stale:
                found = await self.store.command("HGET", self.keys.meta, "revision")
                self._stale = int(found or 0) != self.book.number("revision")
            if self._stale:
                await self._reload()

    async def change(self, script: str, *args: str | int | bytes) -> Any:
        """Run a script inside a transaction; what it answers.

        The book is read again before the next transaction if it is unknown what was written.

        Raises:
            UnavailableError: another replica of this service owns the job, or the store is not at
                the state that the book shows.
        """
        self._stale = True
        revision = self.book.number("revision")
        reply = await self.store.run(script, self.keys.scripts, *args, revision, self._epoch)
        head: dict[str, Any] = json.loads(reply[0])
        changes = self.book.apply(head, reply[1], deadline=self.lease_end())
        self._stale = False
        self.traces.moved(
            changes,
            reasons=[k.partition("drop:")[2] for k in head["counts"] or {} if "drop:" in k],
            step=self.book.step,
            incarnation=self.book.number("incarnation"),
        )
        return head["answer"]

    async def listed(self) -> set[str]:
        """Payloads of trajectories that were trained or measured and can be asked for."""
        names = set[str]()
        for ring in (self.keys.ring, self.keys.eval_ring):
            found: list[bytes] = await self.store.command("ZRANGE", ring, 0, -1)
            names.update(name.decode() for name in found)
        return names

    def lease_end(self) -> float:
        """When a lease that is granted or renewed at this moment runs out."""
        return self.clock.now() + self.spec.experience.lease_s

    async def note(self, **fields: str | int) -> None:
        """Inside a transaction: set fields of the job's state."""
        await self.change("note", json.dumps(fields))

    async def keep_time(self) -> None:
        """Write the job's time down, now and then: what a restart goes on from."""
        async with self.transaction() as book:
            now = self.clock.now()
            if now - float(book.meta.get("clock") or 0) >= _KEEP_TIME_S:
                await self.note(clock=repr(now))

    def invalidate(self) -> None:
        """Read the book again before the next transaction."""
        self._stale = True

    async def _reload(self) -> None:
        known = self.book.number("revision")
        await self._load()
        lost = known - self.book.number("revision")
        if lost > 0:
            self._is_back = True
            self.meter.went_back()
            log.error(
                "the store has lost what was written last; goes on from what it holds",
                job=self.job_id,
                step=self.book.step,
                version=self.book.version,
                writes_lost=lost,
            )
        if self._is_back and self._went_back is not None:
            try:
                await self._went_back()
            finally:
                # A change inside has ended the doubt; after an error all of this is done again.
                self._stale = True
        self._is_back = self._stale = False

    async def _load(self) -> None:
        keys = self.keys
        names = (keys.counts, keys.meta, keys.groups, keys.batches, keys.versions)
        counts, meta, groups, batches, versions = await self.store.hashes(*names)
        old, book = self.book, Book()
        book.counts.update({k.decode(): int(v) for k, v in counts.items()})
        book.meta.update({k.decode(): v.decode() for k, v in meta.items()})
        book.batches.update({int(k): json.loads(v) for k, v in batches.items()})
        for text in versions.values():
            self.add_version(book, json.loads(text))
        await self.clock.resume(float(book.meta.get("clock") or 0))
        for key, text in groups.items():
            name = key.decode()
            book.enter(name, text, before=old.groups.get(name), deadline=self.lease_end())
        self.feed.load(book.meta.get("feed", ""))
        self.book = book
        self._stale = False

    @staticmethod
    def add_version(book: Book, version: dict[str, Any]) -> None:
        """Enter a publication into the book."""
        number = int(version["version"])
        book.digests[number] = str(version.get("digest", ""))
        numbers = {key: int(value) for key, value in version.items() if key != "digest"}
        book.versions[number] = numbers
        book.ages[number] = int(version["age_step"])
