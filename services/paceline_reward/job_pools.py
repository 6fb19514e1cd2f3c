"""Children for functions that came with a job: sealed, and of that job alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import paceline_reward
from paceline.isolation.cap import ProcessCap, Release
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.sealed import sandbox_for, start_sealed
from paceline.isolation.process import ChildProcess
from paceline.isolation.sandbox.sealed_process import SealedProcess
from paceline.isolation.sandbox.zygote import LANDLOCK
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.platform.telemetry.metrics import Metrics
from paceline.plugins import RewardInput
from paceline.types import Score
from paceline_reward.parts import RewardPart
from paceline_reward.pool import ChildPool

IDLE_S = 30.0
_MODULE = "paceline_reward.child"
MAX_PROCESSES = 64  # of all jobs
_MOST = 64  # jobs with children at a time, else the one that is idle for longest goes
_PACKAGE = Path(paceline_reward.__file__ or "").resolve().parents[1]


@dataclass(slots=True)
class _JobPool:
    pool: ChildPool
    last_s: float
    calls: int = 0


class JobPools:
    """A pool for each job that brings code; it is closed once the job asks for nothing more."""

    def __init__(
        self,
        *,
        processes: int,
        memory_bytes: int = 2 << 30,
        sandbox_level: int = LANDLOCK,
        folder_of: Callable[[str, QueueOwner], Awaitable[CodeFolder]],
        max_processes: int = MAX_PROCESSES,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        """`processes` of each job work at a time, `max_processes` of all live.

        `folder_of` returns where a code is. `sandbox_level`: the least by which they have to be
        held.
        """
        self.num_scored = 0
        self._sandbox = sandbox_for(_MODULE, _PACKAGE, lowest=sandbox_level)
        self._processes = processes
        self._memory_bytes = memory_bytes
        self._folder_of = folder_of
        self._cap = ProcessCap(
            max_processes,
            on_waiting=partial((metrics or Metrics()).set, "code_processes_waiting"),
            make_room=self._end_idle,
        )
        self._idle_s = idle_s
        self._clock = clock
        self._pools: dict[tuple[QueueOwner, str], _JobPool] = {}

    async def run(
        self, code: str, part: RewardPart, items: Sequence[RewardInput], *, owner: QueueOwner
    ) -> list[Score]:
        """Score items with a function of the job's code; see `ChildPool.run`."""
        found = self._pools.get((owner, code))
        if found is None:
            # Slots of its own: a job whose functions hang must not hold those of others.
            pool = ChildPool(
                partial(self._start, code, owner),
                FairQueue(self._processes),
                keeps=lambda: not self._cap.wanted,
            )
            found = self._pools[owner, code] = _JobPool(pool, self._clock())
        found.calls += 1
        before = found.pool.num_scored
        try:
            await self._make_room()
            return await found.pool.run(part, items, owner=owner)
        finally:
            found.calls -= 1
            found.last_s = self._clock()
            self.num_scored += found.pool.num_scored - before

    async def end(self, job_id: str) -> None:
        """A job is over: kill its children at once."""
        over = [key for key in self._pools if key[0].job_id == job_id]
        await asyncio.gather(*(self._pools.pop(key).pool.close() for key in over))

    @property
    def jobs(self) -> set[str]:
        """Jobs that have children."""
        return {key[0].job_id for key in self._pools}

    async def sweep(self) -> None:
        """Close pools that have been idle for long, until cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            limit_s = self._clock() - self._idle_s
            for key, each in list(self._pools.items()):
                is_idle = not each.calls and each.last_s < limit_s
                if is_idle and self._pools.get(key) is each:
                    del self._pools[key]
                    await each.pool.close()

    async def close(self) -> None:
        """Kill all children."""
        pools, self._pools = self._pools, {}
        await asyncio.gather(*(each.pool.close() for each in pools.values()))
        await self._sandbox.close()

    async def _make_room(self) -> None:
        while len(self._pools) > _MOST:
            idle = [(each.last_s, key) for key, each in self._pools.items() if not each.calls]
            if not idle:
                return
            await self._pools.pop(min(idle)[1]).pool.close()

    async def _end_idle(self, owner: QueueOwner) -> None:
        """End a child that has nothing to do, of the job with the most of them."""
        pools = [each.pool for each in self._pools.values()]
        for pool in sorted(pools, key=lambda each: -each.num_alive):
            if await pool.end_idle():
                return

    async def _start(self, code: str, owner: QueueOwner) -> ChildProcess:
        folder = await self._folder_of(code, owner)
        release = await self._cap.take(owner)
        try:
            process = await start_sealed(
                self._sandbox,
                folder,
                _MODULE,
                packages=(_PACKAGE,),
                memory_bytes=self._memory_bytes,
            )
        except BaseException:
            release()
            raise
        return _CountedProcess(process, release)


class _CountedProcess:
    """A sealed process that gives its place back when it is killed."""

    def __init__(self, process: SealedProcess, release: Release) -> None:
        self._process = process
        self._release = release
        self.receive = process.receive
        self.pause, self.resume = process.pause, process.resume
        self.write = process.write
        self.exit_text = process.exit_text

    async def kill(self) -> None:
        """See `ChildProcess`."""
        await self._process.kill()
        self._release()
