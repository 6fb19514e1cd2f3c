"""All environments that came with jobs, on one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.code.folders import CodeFolders
from paceline.code.process_cap import ProcessCap
from paceline.fair_queue import QueueOwner
from paceline.plugins import Environment
from paceline.sandbox.sandbox import Sandbox
from paceline.telemetry.metrics import Metrics
from paceline_environment.worlds.processes import JobProcesses
from paceline_environment.worlds.remote import RemoteWorld

_SWEEP_S = 0.25


class JobWorlds:
    """Makes worlds of jobs; one family of processes for each job."""

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        folders: CodeFolders,
        memory_bytes: int,
        max_processes: int,
        metrics: Metrics | None = None,
    ) -> None:
        """`memory_bytes` of address space for each of at most `max_processes` processes."""
        self._sandbox = sandbox
        self._memory_bytes = memory_bytes
        self._folders = folders
        self._cap = ProcessCap(max_processes, metrics=metrics, make_room=self._make_room)
        self._jobs: dict[str, JobProcesses] = {}

    def of(
        self, job_id: str, *, code: str, target: str, tenant: str = ""
    ) -> Callable[..., Environment]:
        """The factory of worlds of a job, whose code has this digest."""
        processes = self._jobs.get(job_id)
        if processes is None:
            processes = self._jobs[job_id] = JobProcesses(
                sandbox=self._sandbox,
                folder=partial(self._folders.folder, code),
                target=target,
                memory_bytes=self._memory_bytes,
                cap=self._cap,
                owner=QueueOwner(tenant, job_id),
            )

        def make(**options: Any) -> Environment:
            return RemoteWorld(processes, options)

        return make

    async def _make_room(self, owner: QueueOwner) -> None:
        """End an idle process, or one of the job with the most unless `owner` then had more."""
        own = self._jobs.get(owner.job_id)
        least = own.num_processes + 2 if own is not None else 2
        others = [each for each in self._jobs.values() if each is not own]
        for each in sorted(others, key=lambda each: -each.num_processes):
            if await each.give(moving=each.num_processes >= least):
                return

    async def prepare(self, code: str) -> None:
        """Fetch code and install what it requires, before an episode waits for it.

        Raises:
            PacelineError: as `CodeFolders.folder`.
        """
        await self._folders.folder(code)

    async def end(self, job_id: str) -> None:
        """A job is over: kill its processes at once."""
        processes = self._jobs.pop(job_id, None)
        if processes is not None:
            await processes.close("its job is over")

    async def sweep(self) -> None:
        """End stuck and idle processes, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for each in list(self._jobs.values()):
                await each.sweep()

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(each.close() for each in self._jobs.values()))
