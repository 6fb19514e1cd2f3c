"""The processes of the environments of jobs: started when needed, ended when idle or stuck."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.code.world_process import WorldError, WorldProcess
from paceline.sandbox.sandbox import Sandbox
from paceline.telemetry.logs import Log

EPISODES_PER_PROCESS = 32
MAX_PROCESSES = 32  # of a job; beyond, processes get more episodes
MAX_ALONE = 32  # episodes of a job in processes of their own
IDLE_S = 30.0
# A process with a call that was given up for so long is killed: its other episodes are moved, which
# takes a moment, or are lost if they cannot be replayed.
STUCK_S = {True: 0.5, False: 5.0}
log = Log("worlds")


@dataclass(slots=True, eq=False)
class HostProcess:
    """A process, and how many episodes live in it."""

    process: WorldProcess
    alone: bool  # for one episode that may have ended another process
    episodes: int = 0
    replayable: bool = True  # all of them
    idle_since: float = 0.0
    killed: bool = False  # by us: no call that is in progress in it is to blame

    @property
    def usable(self) -> bool:
        """Whether another episode may live in it."""
        return not (self.process.ended or self.alone or self.process.late)


class JobProcesses:
    """The processes of one job."""

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        folder: Callable[[], Awaitable[Path]],
        target: str,
        memory_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.clock = clock
        self._sandbox = sandbox
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._hosts: list[HostProcess] = []
        self._starting = asyncio.Lock()

    @property
    def num_processes(self) -> int:
        """Processes that live."""
        return len(self._hosts)

    async def host(self, *, alone: bool = False) -> HostProcess:
        """A process for one more episode, which `leave` gives back.

        Raises:
            PacelineError: none can be started, or the code cannot be had.
        """
        async with self._starting:
            usable = [each for each in self._hosts if each.usable]
            best = min(usable, key=lambda each: each.episodes, default=None)
            full = best is None or best.episodes >= EPISODES_PER_PROCESS
            num_alone = sum(each.alone for each in self._hosts)
            if alone and num_alone >= MAX_ALONE:
                raise WorldError("environment: too many of its processes have ended")
            if best is None or alone or (full and len(self._hosts) - num_alone < MAX_PROCESSES):
                threads = 1 if alone else EPISODES_PER_PROCESS
                process = await WorldProcess.start(
                    self._sandbox,
                    await self._folder(),
                    self.target,
                    threads=threads,
                    memory_bytes=self._memory_bytes,
                )
                best = HostProcess(process, alone)
                self._hosts.append(best)
            best.episodes += 1
            return best

    async def leave(self, host: HostProcess) -> None:
        """An episode is over, or its process is."""
        host.episodes -= 1
        host.idle_since = self.clock()
        if host.process.ended or (host.alone and not host.episodes):
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
            elif not host.episodes and now - host.idle_since > IDLE_S:
                await self._drop(host, "it is idle")

    async def close(self) -> None:
        """Kill all."""
        await asyncio.gather(*(self._drop(host, "the worker ends") for host in [*self._hosts]))

    async def _drop(self, host: HostProcess, why: str) -> None:
        if host in self._hosts:
            self._hosts.remove(host)
        await host.process.kill(why)
