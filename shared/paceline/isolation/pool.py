"""Processes that wait for further work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from paceline.errors import PacelineError


class PooledProcess(Protocol):
    """A process, or what speaks to one."""

    @property
    def broken(self) -> bool:
        """Whether it can do nothing any more."""
        ...

    async def kill(self) -> None:
        """End it."""
        ...


Worker = TypeVar("Worker", bound=PooledProcess)


class ProcessPool(Generic[Worker]):
    """Takes an idle process or starts one; whoever takes it bounds how many work at a time."""

    def __init__(
        self,
        start: Callable[[], Awaitable[Worker]],
        *,
        keeps: Callable[[], bool] = lambda: True,
        over: str = "it is closed",
    ) -> None:
        """`keeps`: whether a process that has done its work may wait for more.

        `over`: what those hear who ask for one after `close`.
        """
        self._start = start
        self._keeps = keeps
        self._over = over
        self._idle: list[Worker] = []
        self._alive: set[Worker] = set()
        self._closed = False

    @property
    def num_alive(self) -> int:
        """Processes that live."""
        return len(self._alive)

    @asynccontextmanager
    async def taken(self) -> AsyncGenerator[Worker]:
        """A process of one's own; it is killed if what is done with it raises or is cancelled.

        Raises:
            PacelineError: the pool is closed; or as the start of a process.
        """
        worker = await self._take()
        intact = False
        try:
            yield worker
            intact = not worker.broken
        finally:
            if intact and self._keeps() and not self._closed:
                self._idle.append(worker)
            else:
                self._alive.discard(worker)
                await worker.kill()

    async def end_idle(self) -> bool:
        """Kill a process that has nothing to do; whether there was one."""
        if not self._idle:
            return False
        worker = self._idle.pop(0)
        self._alive.discard(worker)
        await worker.kill()
        return True

    async def close(self) -> None:
        """Kill all, and start no more."""
        self._closed = True
        await asyncio.gather(*(worker.kill() for worker in list(self._alive)))
        self._alive.clear()
        self._idle.clear()

    async def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.broken:
                return worker
            self._alive.discard(worker)
            await worker.kill()
        worker = await self._start()
        if self._closed:  # meanwhile
            await worker.kill()
            raise PacelineError(self._over)
        self._alive.add(worker)
        return worker
