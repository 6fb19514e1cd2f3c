"""Processes simulated by tasks of this one: killing one ends everything that it does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from typing import Any, TypeVar
from weakref import WeakSet

Answer = TypeVar("Answer")
_CURRENT: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)


class SimulatedProcess:
    """All tasks that `start` and its tasks have created, directly or not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.main: asyncio.Task[Any] | None = None

    async def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start its main task."""
        before = _CURRENT.set(self)
        try:
            self.main = asyncio.create_task(work, name=self.name)
        finally:
            _CURRENT.reset(before)

    @property
    def alive(self) -> bool:
        """Whether its main task has not ended."""
        return self.main is not None and not self.main.done()

    @property
    def last_words(self) -> str:
        """The error that has ended it; empty: it is alive."""
        if self.main is None or not self.main.done():
            return ""
        return "killed" if self.main.cancelled() else repr(self.main.exception())

    async def kill(self) -> None:
        """End everything; what cancelled tasks still do in their `finally` has no effect."""
        own: list[asyncio.Task[Any]] = []
        for _ in range(20):
            own = [each for each in self.tasks if not each.done()]
            own = [each for each in own if each is not asyncio.current_task()]
            if not own:
                return
            for each in own:
                each.cancel()
            await asyncio.wait(own, timeout=0.5)
        raise AssertionError(f"{self.name} does not end: {own}")


async def detached(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await something that belongs to no process, and goes on if the caller's is killed."""
    task = asyncio.get_running_loop().create_task(work, context=Context())
    return await asyncio.shield(task)


def track_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop note which process a new task belongs to."""

    def make(
        loop: asyncio.AbstractEventLoop,
        work: Any,
        *,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, context=context, **options)
        process = _CURRENT.get() if context is None else context.get(_CURRENT)
        if process is not None:
            process.tasks.add(task)
        return task

    loop.set_task_factory(make)
