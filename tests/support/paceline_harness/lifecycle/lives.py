"""Lives of processes inside this process: everything that one of them does ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from typing import Any, TypeVar
from weakref import WeakSet

Answer = TypeVar("Answer")
_LIFE: ContextVar[Life | None] = ContextVar("life", default=None)


class Life:
    """All tasks that `start` and its tasks have created, directly or not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.main: asyncio.Task[Any] | None = None

    async def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin the life with its main task."""
        before = _LIFE.set(self)
        try:
            self.main = asyncio.create_task(work, name=self.name)
        finally:
            _LIFE.reset(before)

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


async def outlive(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await something that goes on, in no life, if the caller's ends."""
    task = asyncio.get_running_loop().create_task(work, context=Context())
    return await asyncio.shield(task)


def follow_lives(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop note to which life a new task belongs."""

    def make(
        loop: asyncio.AbstractEventLoop,
        work: Any,
        *,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, context=context, **options)
        life = _LIFE.get() if context is None else context.get(_LIFE)
        if life is not None:
            life.tasks.add(task)
        return task

    loop.set_task_factory(make)
