"""All environments that came with jobs, on one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.code.folders import CodeFolders
from paceline.plugins import Environment
from paceline.sandbox.sandbox import Sandbox
from paceline_environment.worlds.processes import JobProcesses
from paceline_environment.worlds.remote import RemoteWorld

_SWEEP_S = 0.25


class JobWorlds:
    """Makes worlds of jobs; one family of processes for each job."""

    def __init__(self, *, sandbox: Sandbox, folders: CodeFolders, memory_bytes: int) -> None:
        """`memory_bytes` of address space for each process."""
        self._sandbox = sandbox
        self._memory_bytes = memory_bytes
        self._folders = folders
        self._jobs: dict[str, JobProcesses] = {}

    def of(self, job_id: str, *, code: str, target: str) -> Callable[..., Environment]:
        """The factory of worlds of a job, whose code has this digest."""
        processes = self._jobs.get(job_id)
        if processes is None:
            processes = self._jobs[job_id] = JobProcesses(
                sandbox=self._sandbox,
                folder=partial(self._folders.folder, code),
                target=target,
                memory_bytes=self._memory_bytes,
            )

        def make(**options: Any) -> Environment:
            return RemoteWorld(processes, options)

        return make

    async def sweep(self) -> None:
        """End stuck and idle processes, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for each in list(self._jobs.values()):
                await each.sweep()

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(each.close() for each in self._jobs.values()))
