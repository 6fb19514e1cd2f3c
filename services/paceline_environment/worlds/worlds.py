"""All environments of this worker whose worlds live in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from paceline.isolation.cap import ProcessCap
from paceline.isolation.code.folders import CodeFolder, CodeFolders
from paceline.isolation.code.sealed import OWN
from paceline.isolation.code.world_process import WorldProcess
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.telemetry.metrics import Metrics
from paceline.plugins import Environment
from paceline_environment.worlds.processes import EPISODES_PER_PROCESS, LOAD_S, JobProcesses, Start
from paceline_environment.worlds.remote import RemoteWorld
from paceline_environment.worlds.transforms import RemoteTransform

_SWEEP_S = 0.25
_TRANSFORM = "/transform"  # after the id of a job, which has no such character
_OPEN_EPISODES = 256  # share an open process, which mostly waits and is slow to start


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
        self._cap = ProcessCap(
            max_processes,
            on_waiting=partial((metrics or Metrics()).set, "code_processes_waiting"),
            make_room=self._make_room,
        )
        self._jobs: dict[str, JobProcesses] = {}

    def of(
        self, job_id: str, *, code: str, target: str, tenant: str = "", load_s: float = LOAD_S
    ) -> Callable[..., Environment]:
        """The factory of worlds of a job, whose code has this digest and loads in `load_s`."""
        owner = QueueOwner(tenant, job_id)
        folder = partial(self._folders.folder, code, owner)
        return self._factory(owner, target, folder, self._sealed_start(target), load_s=load_s)

    def transform(
        self,
        job_id: str,
        *,
        code: str,
        target: str,
        options: Mapping[str, Any],
        tenant: str = "",
        load_s: float = LOAD_S,
    ) -> RemoteTransform:
        """The transform of a job, a function of its code, in processes of its own."""
        owner = QueueOwner(tenant, job_id)
        key = f"{job_id}{_TRANSFORM}"
        processes = self._jobs.get(key)
        if processes is None:
            processes = self._jobs[key] = JobProcesses(
                start=self._sealed_start(target),
                folder=partial(self._folders.folder, code, owner),
                target=target,
                cap=self._cap,
                owner=owner,
                load_s=load_s,
                load_call="load_function",
            )
        return RemoteTransform(processes, options)

    def installed(
        self,
        job_id: str,
        *,
        target: str,
        sealed: bool,
        tenant: str = "",
        load_s: float = LOAD_S,
    ) -> Callable[..., Environment]:
        """The factory of worlds of an installed environment, for one job."""
        owner = QueueOwner(tenant, job_id)
        if sealed:
            return self._factory(owner, target, _no_code, self._sealed_start(target), load_s=load_s)

        async def start(_: CodeFolder, threads: int) -> WorldProcess:
            return await WorldProcess.start_open(target, threads=threads)

        return self._factory(owner, target, _no_code, start, load_s=load_s, episodes=_OPEN_EPISODES)

    def _sealed_start(self, target: str) -> Start:
        async def start(code: CodeFolder, threads: int) -> WorldProcess:
            memory_bytes = self._memory_bytes
            return await WorldProcess.start(
                self._sandbox, code, target, threads=threads, memory_bytes=memory_bytes
            )

        return start

    def _factory(
        self,
        owner: QueueOwner,
        target: str,
        folder: Callable[[], Awaitable[CodeFolder]],
        start: Start,
        *,
        load_s: float,
        episodes: int = EPISODES_PER_PROCESS,
    ) -> Callable[..., Environment]:
        processes = self._jobs.get(owner.job_id)
        if processes is None:
            processes = self._jobs[owner.job_id] = JobProcesses(
                start=start,
                folder=folder,
                target=target,
                episodes=episodes,
                cap=self._cap,
                owner=owner,
                load_s=load_s,
            )

        def make(**options: Any) -> Environment:
            return RemoteWorld(processes, options)

        return make

    async def _make_room(self, owner: QueueOwner) -> None:
        """End an idle process, or one of the job with the most unless `owner` then had more."""
        own = self._jobs.get(owner.job_id)
        least = own.num_processes + 2 if own is not None else 2
        others = [job for job in self._jobs.values() if job is not own]
        for job in sorted(others, key=lambda job: -job.num_processes):
            if await job.give(moving=job.num_processes >= least):
                return

    async def prepare(self, code: str, owner: QueueOwner) -> None:
        """Fetch code and install what it requires, before an episode waits for it.

        Raises:
            PacelineError: as `CodeFolders.folder`.
        """
        await self._folders.folder(code, owner)

    async def end(self, job_id: str) -> None:
        """A job is over: kill its processes at once, and let its packages go."""
        for key in (job_id, f"{job_id}{_TRANSFORM}"):
            processes = self._jobs.pop(key, None)
            if processes is not None:
                await processes.close("its job is over")
        await self._folders.end(job_id)

    @property
    def jobs(self) -> set[str]:
        """Jobs for which something is kept."""
        return {key.removesuffix(_TRANSFORM) for key in self._jobs} | self._folders.jobs

    async def sweep(self) -> None:
        """End stuck and idle processes, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for job in list(self._jobs.values()):
                await job.sweep()

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(job.close() for job in self._jobs.values()))


async def _no_code() -> CodeFolder:
    """The code folder of installed environments, which their processes may read anyway."""
    return CodeFolder(OWN)
