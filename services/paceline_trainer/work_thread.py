"""A thread for work that takes long, and whether it is at it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class WorkThread:
    """One thread, for one piece of work at a time; `busy` and `num_done` are for probes."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self.ident = 0  # of the thread; 0: it has not begun
        self.busy = False
        self.num_done = 0

    def submit(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Begin the work, for whoever waits for it."""
        self.busy = True
        future = self._executor.submit(self._run, work, *args, **kwargs)
        future.add_done_callback(self._count)
        return future

    async def run(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of the work; raises what it raises."""
        return await asyncio.wrap_future(self.submit(work, *args, **kwargs))

    def close(self) -> None:
        """Take no more work; what it is at goes on."""
        self._executor.shutdown(wait=False)

    def _run(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        self.ident = threading.get_ident()
        return work(*args, **kwargs)

    def _count(self, _: Future[Any]) -> None:
        self.busy = False
        self.num_done += 1
