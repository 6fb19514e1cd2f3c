"""Leader election among controllers, by a Lease that has to be renewed.

A candidate measures on its own clock how long *it* has seen no renewal, so clocks need not agree. A
leader counts from before its last successful write was sent, and stops acting after
`renew_within_s`, which is less than `lease_s`: before anyone else can start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.errors import ConflictError, NotFoundError, PacelineError
from paceline.platform.telemetry.logs import Log

log = Log("leader")


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The content of the lease; `version` changes with every write."""

    holder: str  # empty: free
    version: str
    transitions: int = 0


class LeaseStore(Protocol):
    """Stores the lease with optimistic concurrency by version."""

    async def read(self) -> LeaseRecord:
        """The lease; raises `NotFoundError` if there is none."""
        ...

    async def make(self, record: LeaseRecord) -> LeaseRecord:
        """Create the lease; raises `ConflictError` if there is one."""
        ...

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """Replace the version that `record` names; raises `ConflictError` if it has changed."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds; clocks may run up to `lease_s / renew_within_s` apart in rate."""

    lease_s: float = 15.0
    renew_within_s: float = 10.0
    retry_s: float = 2.0


class Candidate:
    """Decides what to write from what was read and when; knows whether it may act."""

    def __init__(self, identity: str, times: LeaseTimes) -> None:
        if not times.retry_s < times.renew_within_s < times.lease_s:
            raise ValueError("retry_s < renew_within_s < lease_s is needed")
        self._identity = identity
        self._times = times
        self._seen = ""  # version of the lease
        self._seen_s = 0.0
        self._until_s: float | None = None

    def acting(self, now_s: float) -> bool:
        """Whether it leads at this moment."""
        return self._until_s is not None and now_s < self._until_s

    def left_s(self, now_s: float) -> float:
        """Seconds until it must stop unless it renews."""
        return 0.0 if self._until_s is None else max(self._until_s - now_s, 0.0)

    def bid(self, lease: LeaseRecord | None, now_s: float) -> LeaseRecord | None:
        """The record to write after reading the lease; None: another candidate holds it."""
        if lease is None:
            return LeaseRecord(self._identity, "")
        if lease.version != self._seen:
            self._seen, self._seen_s = lease.version, now_s
        if lease.holder == self._identity and self.acting(now_s):
            return lease
        free = not lease.holder or now_s - self._seen_s >= self._times.lease_s
        if not free:
            return None
        return replace(lease, holder=self._identity, transitions=lease.transitions + 1)

    def won(self, written: LeaseRecord, *, sent_s: float) -> None:
        """The write was accepted; `sent_s` is from before it was sent."""
        self._seen, self._seen_s = written.version, sent_s
        self._until_s = sent_s + self._times.renew_within_s

    def lost(self) -> None:
        """Note that it no longer leads."""
        self._until_s = None


class Leader:
    """Runs work while this process leads, and cancels it in time."""

    def __init__(
        self,
        leases: LeaseStore,
        *,
        identity: str,
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._times = times or LeaseTimes()
        self._identity = identity
        self._clock = clock
        self._candidate = Candidate(identity, self._times)

    @property
    def acting(self) -> bool:
        """Whether this process leads."""
        return self._candidate.acting(self._clock())

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Campaign and work in turns until cancelled; then release the lease.

        What `work` raises is raised. Its task has ended before the lease can go to another.
        """
        try:
            while True:
                await self.campaign()
                if self.acting:
                    await self._term(work)
                await asyncio.sleep(self._times.retry_s)
        finally:
            await self._resign()

    async def campaign(self) -> None:
        """One attempt to get or renew the lease; errors are logged."""
        try:
            async with asyncio.timeout(self._times.renew_within_s / 2):
                await self._campaign()
        except ConflictError:
            return  # another candidate was faster
        except (PacelineError, TimeoutError) as error:
            log.warning("lease not renewed", identity=self._identity, error=error)

    async def _campaign(self) -> None:
        try:
            lease = await self._leases.read()
        except NotFoundError:
            lease = None
        sent_s = self._clock()
        bid = self._candidate.bid(lease, sent_s)
        if bid is None:
            self._candidate.lost()
            return
        write = self._leases.write if lease else self._leases.make
        self._candidate.won(await write(bid), sent_s=sent_s)

    async def _term(self, work: Callable[[], Awaitable[None]]) -> None:
        log.info("leads", identity=self._identity)
        task = asyncio.ensure_future(work())
        renewal = asyncio.create_task(self._renew(), name="renewal")
        try:
            while self.acting and not task.done():
                left_s = self._candidate.left_s(self._clock())
                await asyncio.wait({task}, timeout=min(left_s, self._times.retry_s))
        finally:
            renewal.cancel()
            self._candidate.lost()
            await _cancel(task)
            log.info("leads no longer", identity=self._identity)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._times.retry_s)
            await self.campaign()

    async def _resign(self) -> None:
        """Release the lease, so that another candidate can start at once."""
        try:
            async with asyncio.timeout(self._times.retry_s):
                lease = await self._leases.read()
                if lease.holder == self._identity:
                    await self._leases.write(replace(lease, holder=""))
        except (PacelineError, TimeoutError) as error:
            log.warning("lease not handed over", identity=self._identity, error=error)


async def _cancel(task: asyncio.Future[None]) -> None:
    """Cancel it and wait until it has; raises what it raised before."""
    if task.done():
        task.result()
        return
    task.cancel()
    await asyncio.wait({task})
