"""The processes of one environment of a job: started when needed, ended when idle or stuck."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from paceline.isolation.cap import ProcessCap, Release
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.world_process import WorldError, WorldProcess
from paceline.platform.fair_queue import NO_OWNER, QueueOwner
from paceline.platform.telemetry.logs import Log

EPISODES_PER_PROCESS = 32
MAX_PROCESSES = 32  # of a job; beyond, processes get more episodes
MAX_ALONE = 32  # episodes of a job in processes of their own
IDLE_S = 30.0
LOAD_S = 300.0
# A process with a call that was given up for so long is killed: its other episodes are moved, which
# takes a moment, or are lost if they cannot be replayed.
STUCK_S = {True: 0.5, False: 5.0}
Start = Callable[[CodeFolder, int], Awaitable[WorldProcess]]
log = Log("worlds")


@dataclass(slots=True, eq=False)
class HostProcess:
    """A process, and how many episodes live in it."""

    process: WorldProcess
    alone: bool  # for one episode that may have ended another process
    release: Release  # gives its place back
    loading: asyncio.Task[None]  # its environment; calls wait for it
    episodes: int = 0
    replayable: bool = True  # all of them
    idle_since: float = 0.0
    killed: bool = False  # by us: no call that is in progress in it is to blame

    @property
    def usable(self) -> bool:
        """Whether another episode may live in it."""
        return not (self.process.ended or self.alone or self.process.late or self.unloadable)

    @property
    def unloadable(self) -> bool:
        """Whether its environment could not be loaded."""
        loading = self.loading
        return loading.done() and (loading.cancelled() or loading.exception() is not None)


class JobProcesses:
    """The processes of one job."""

    def __init__(
        self,
        *,
        start: Start,
        folder: Callable[[], Awaitable[CodeFolder]],
        target: str,
        episodes: int = EPISODES_PER_PROCESS,
        cap: ProcessCap | None = None,
        owner: QueueOwner = NO_OWNER,
        load_s: float = LOAD_S,
        load_call: str = "load",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start` makes a process with so many threads; `episodes` share one.

        Loading the environment in it, by `load_call`, may take `load_s` seconds.
        """
        self._load_call = load_call
        self.target = target
        self.clock = clock
        self._start_process = start
        self._folder = folder
        self._episodes = episodes
        self._cap = cap or ProcessCap(MAX_PROCESSES + MAX_ALONE)
        self._owner = owner
        self._load_s = load_s
        self._hosts: list[HostProcess] = []
        self._starting = asyncio.Lock()
        self._closed = ""  # why no process is started any more

    @property
    def num_processes(self) -> int:
        """Processes that live."""
        return len(self._hosts)

    async def host(self, *, alone: bool = False) -> HostProcess:
        """A process for one more episode, which `leave` gives back; it may still be loading.

        Raises:
            PacelineError: none can be started, or the code cannot be had.
        """
        async with self._starting:
            if self._closed:
                raise WorldError(f"environment: {self._closed}")
            usable = [host for host in self._hosts if host.usable]
            best = min(usable, key=lambda host: host.episodes, default=None)
            num_alone = sum(host.alone for host in self._hosts)
            if alone and num_alone >= MAX_ALONE:
                raise WorldError("environment: too many of its processes have ended")
            full = best is None or best.episodes >= self._episodes
            may_start = len(self._hosts) - num_alone < MAX_PROCESSES and not self._cap.full
            if best is None or alone or (full and may_start):
                best = await self._start(alone=alone)
            best.episodes += 1
            return best

    async def _start(self, *, alone: bool) -> HostProcess:
        code = await self._folder()
        release = await self._cap.take(self._owner)
        try:
            process = await self._start_process(code, 1 if alone else self._episodes)
        except BaseException:
            release()
            raise
        loading = asyncio.create_task(self._load(process), name="load environment")
        host = HostProcess(process, alone, release, loading)
        self._hosts.append(host)
        if self._closed:  # meanwhile
            await self._drop(host, self._closed)
            raise WorldError(f"environment: {self._closed}")
        return host

    async def _load(self, process: WorldProcess) -> None:
        """Import the environment, before a call counts that has to wait for it."""
        try:
            async with asyncio.timeout(self._load_s):
                await process.call(self._load_call)
        except TimeoutError:
            why = f"did not load within {self._load_s:g} s (tasks.load_timeout_s)"
            log.warning("environment did not load", environment=self.target, seconds=self._load_s)
            await process.kill(f"it {why}")
            raise WorldError(f"environment: {why}") from None

    async def give(self, *, moving: bool = False) -> bool:
        """End a process for another job; whether there was one.

        An idle one, or with `moving` one whose episodes can be moved to the others of this job.
        """
        idle = [host for host in self._hosts if not host.episodes]
        if not idle and moving:
            shared = [host for host in self._hosts if not host.alone]
            movable = [host for host in shared if host.replayable and len(shared) > 1]
            idle = sorted(movable, key=lambda host: host.episodes)
        if not idle:
            return False
        idle[0].killed = True
        await self._drop(idle[0], "another job needs its place")
        return True

    async def leave(self, host: HostProcess) -> None:
        """An episode is over, or its process is."""
        host.episodes -= 1
        host.idle_since = self.clock()
        unused = not host.episodes and (host.alone or self._cap.wanted)
        if host.process.ended or host.unloadable or unused:
            await self._drop(host, "its episode is over")

    async def sweep(self) -> None:
        """End processes that are stuck or idle."""
        now = self.clock()
        for host in list(self._hosts):
            since = min(host.process.late.values(), default=now)
            if now - since > STUCK_S[host.replayable]:
                log.warning("process of an environment is stuck", environment=self.target)
                host.killed = True
                await self._drop(host, "another episode of its process did not end its call")
            elif not host.episodes and host.loading.done() and now - host.idle_since > IDLE_S:
                await self._drop(host, "it is idle")

    async def close(self, why: str = "the worker ends") -> None:
        """Kill all, and start no more."""
        self._closed = why
        await asyncio.gather(*(self._drop(host, why) for host in [*self._hosts]))

    async def _drop(self, host: HostProcess, why: str) -> None:
        if host in self._hosts:
            self._hosts.remove(host)
        host.release()
        await host.process.kill(why)
        await asyncio.gather(host.loading, return_exceptions=True)
