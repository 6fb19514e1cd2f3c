"""Shares slots and threads fairly: among tenants first, then among the jobs of a tenant."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")


class QueueOwner(NamedTuple):
    """The tenant and job that a slot is for."""

    tenant: str = ""
    job_id: str = ""


NO_OWNER = QueueOwner()


@dataclass(slots=True)
class _Usage:
    """Slots in use by name, and when each name was last granted one."""

    used: Counter[str] = field(default_factory=Counter[str])
    last: dict[str, int] = field(default_factory=dict[str, int])

    def rank(self, name: str) -> tuple[int, int]:
        return self.used[name], self.last.get(name, -1)


class FairQueue:
    """Grants a free slot to the owner with the fewest; of equals, to the least recently served.

    A tenant or job with a long queue gets its share and no more.
    """

    def __init__(self, slots: int, *, most_of_tenant: int | None = None) -> None:
        """A tenant holds `most_of_tenant` at a time, so that another need not wait for it."""
        self.slots = slots
        self._most_of_tenant = slots if most_of_tenant is None else most_of_tenant
        self._free = slots
        self._waiting: dict[QueueOwner, deque[asyncio.Future[None]]] = {}
        self._tenants = _Usage()
        self._jobs = _Usage()
        self._grants = 0

    @asynccontextmanager
    async def slot(self, owner: QueueOwner) -> AsyncGenerator[None]:
        """Hold a slot inside the context."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: QueueOwner) -> None:
        """Wait for a slot, which `release` gives back."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(waiter)
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(owner)  # it was granted a slot before it was cancelled
            raise

    def _grant(self) -> None:
        while self._free and (owner := self._next_owner()) is not None:
            waiters = self._waiting[owner]
            waiter = waiters.popleft()
            if not waiters:
                del self._waiting[owner]
            if not waiter.done():
                self._free -= 1
                self._grants += 1
                for usage, name in self._usages(owner):
                    usage.used[name] += 1
                    usage.last[name] = self._grants
                waiter.set_result(None)

    def _next_owner(self) -> QueueOwner | None:
        used, most = self._tenants.used, self._most_of_tenant
        allowed = (owner for owner in self._waiting if used[owner.tenant] < most)
        return min(allowed, key=self._rank, default=None)

    def _rank(self, owner: QueueOwner) -> tuple[int, int, int, int]:
        return (*self._tenants.rank(owner.tenant), *self._jobs.rank(owner.job_id))

    def release(self, owner: QueueOwner) -> None:
        """Give a slot of this owner back."""
        self._free += 1
        for usage, name in self._usages(owner):
            usage.used[name] -= 1
            if not usage.used[name]:
                del usage.used[name]
        self._grant()
        if not self._waiting:
            self._reset_order()

    def _reset_order(self) -> None:
        """Drop the order of past grants, which only matters while somebody waits."""
        for usage in (self._tenants, self._jobs):
            usage.last.clear()

    def _usages(self, owner: QueueOwner) -> tuple[tuple[_Usage, str], tuple[_Usage, str]]:
        return (self._tenants, owner.tenant), (self._jobs, owner.job_id)


class FairThreads:
    """Threads for calls that block; nobody who sends many of them keeps another tenant waiting."""

    def __init__(self, threads: int, name: str, *, most_of_tenant: int) -> None:
        """`name`: of the threads. A tenant holds `most_of_tenant` of them at a time."""
        self._slots = FairQueue(threads, most_of_tenant=most_of_tenant)
        self._threads = ThreadPoolExecutor(threads, name)

    async def run(self, owner: QueueOwner, call: Callable[[], Result]) -> Result:
        """The result of a call; one whose caller gives up goes on, and keeps its thread."""
        await self._slots.acquire(owner)
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        running.add_done_callback(lambda _: self._slots.release(owner))
        return await asyncio.shield(running)
