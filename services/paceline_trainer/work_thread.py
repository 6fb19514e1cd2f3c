"""A thread for work that takes long, and whether it is at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class WorkThread:
    """One thread, for one piece of work at a time; `busy` and `num_done` are for probes."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self.busy = False
        self.num_done = 0

    async def run(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of the work; raises what it raises."""
        self.busy = True
        try:
            call = partial(work, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        finally:
            self.busy = False
            self.num_done += 1

    def close(self) -> None:
        """Take no more work; what it is at goes on."""
        self._executor.shutdown(wait=False)
