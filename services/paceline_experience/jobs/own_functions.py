"""What ledgers call of the code of their jobs, in one sealed process for each job."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from paceline.config.named import GENERATION, NamedPlugin
from paceline.isolation.calls import Calls
from paceline.isolation.cap import ProcessCap
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.function_process import start_functions
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.platform.digest import digest_of
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.telemetry.metrics import Metrics
from paceline.plugins import Context
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.own.job_functions import JobFunctions, failed
from paceline_experience.ledger.advantages.episodes import trial_batch
from paceline_experience.ledger.advantages.estimate import checked
from paceline_experience.ledger.filters.chain import trial_group
from paceline_experience.ledger.generation.parts import try_own
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.replay.asked import OwnReplay, try_replay

IDLE_S = 60.0
_TRIED_AT_A_TIME = 2  # jobs of a tenant


class KeepsNeeds(Protocol):
    """Where it is kept what plug-ins of code declare, by their fields."""

    async def needs(self, name: str) -> Mapping[str, Sequence[str]] | None:
        """The needs of these plug-ins; None: they are not kept."""
        ...

    async def put_needs(self, name: str, needs: Mapping[str, Sequence[str]]) -> None:
        """Keep them."""
        ...


class OwnFunctions:
    """Those of all jobs of this service."""

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        folder_of: Callable[[str], Awaitable[CodeFolder]],
        store: KeepsNeeds,
        memory_bytes: int,
        max_processes: int,
        call_s: float,
        check_s: float,
        idle_s: float = IDLE_S,
        lacks_packages: bool = False,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        """`memory_bytes` of address space for each of at most `max_processes` processes.

        `call_s`: timeout of a call; `check_s`: of one before the job is accepted. `folder_of`
        returns where a code is. `lacks_packages`: what the code requires is not installed here, so
        what cannot be imported for lack of it is not checked.
        """
        self._lacks_packages = lacks_packages
        self._sandbox = sandbox
        self._folder_of = folder_of
        self._store = store
        self._memory_bytes = memory_bytes
        self._cap = ProcessCap(
            max_processes,
            on_waiting=partial((metrics or Metrics()).set, "code_processes_waiting"),
            make_room=self._make_room,
        )
        self._call_s = call_s
        self._check_s = check_s
        self._idle_s = idle_s
        self._clock = clock
        self._jobs: dict[str, JobFunctions] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}  # by tenant
        self._ending = set[asyncio.Task[None]]()

    async def check(self, job: JobParts) -> list[str]:
        """Import them in a process of their own, check their options and call each once.

        What workers call is imported and checked, but not called: its input is up to the tasks.
        Returns why some of them could not be tried.

        Raises:
            InvalidError: there is something wrong with one.
            UnavailableError: this machine cannot contain the code.
        """
        if not job.own and not job.own_of_workers:
            return []
        lacks = self._lacks_packages
        async with self._trying(job.tenant, job.code) as functions:
            untried = await functions.check_called_by_workers(
                job.own_of_workers, may_lack_packages=lacks
            )
            needs = await functions.describe(job.own, job.spec, may_lack_packages=lacks)
            for each in job.own:
                if each.options_field in needs and each.kind not in GENERATION:
                    await _try(functions, each, job.rewards, job.generation.context)
        if job.own:
            await self._store.put_needs(_name(job.code, job.own), needs)
        return untried

    async def check_generation(self, job: JobParts, num_tasks: int) -> None:
        """Draw tasks with a sampler of the job's code, and start a group with its allocator.

        Raises as `check`.
        """
        parts = [each for each in job.own if each.kind in GENERATION]
        if not parts:
            return
        async with self._trying(job.tenant, job.code) as functions:
            needs = await functions.describe(
                job.own, job.spec, may_lack_packages=self._lacks_packages
            )
            if all(each.options_field in needs for each in parts):
                await try_own(job.generation, num_tasks, functions)

    @asynccontextmanager
    async def _trying(self, tenant: str, code: str | None) -> AsyncGenerator[JobFunctions]:
        """The code of a job that is not accepted yet, of few jobs of a tenant at a time."""
        slot = self._slots.setdefault(tenant, asyncio.Semaphore(_TRIED_AT_A_TIME))
        async with slot:
            call_s = min(self._call_s, self._check_s)
            functions = self._functions(code, QueueOwner(tenant), call_s)
            try:
                yield functions
            finally:
                await functions.close()

    async def of(self, job_id: str, job: JobParts) -> OwnParts:
        """Those of a job, ready to be called until `end`.

        Raises:
            InvalidError: one can no longer be imported.
            UnavailableError: this machine cannot contain the code.
        """
        if not job.own:
            return NO_PARTS
        functions = self._functions(job.code, QueueOwner(job.tenant, job_id), self._call_s)
        name = _name(job.code, job.own)
        needs = await self._store.needs(name)
        if needs is not None:  # a restart need not wait for the code of every job
            functions.learn(needs)
        else:
            try:
                needs = await functions.describe(job.own, job.spec)
            except BaseException:
                await functions.close()
                raise
            await self._store.put_needs(name, needs)
        self.end(job_id)
        self._jobs[job_id] = functions
        return functions

    def end(self, job_id: str) -> None:
        """A job is over: its process is killed at once."""
        functions = self._jobs.pop(job_id, None)
        if functions is not None:
            task = asyncio.create_task(functions.close(), name="end own code")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def sweep(self) -> None:
        """End processes that have been idle for long, until cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            limit_s = self._clock() - self._idle_s
            for each in list(self._jobs.values()):
                if each.idle and each.last_s < limit_s:
                    await each.end()

    async def close(self) -> None:
        """Kill all processes."""
        for job_id in list(self._jobs):
            self.end(job_id)
        await asyncio.gather(*self._ending)
        await self._sandbox.close()

    def _functions(self, code: str | None, owner: QueueOwner, timeout_s: float) -> JobFunctions:
        assert code is not None
        start = partial(self._start, code)
        return JobFunctions(
            start, cap=self._cap, owner=owner, timeout_s=timeout_s, clock=self._clock
        )

    async def _start(self, code: str) -> Calls:
        folder = await self._folder_of(code)
        return await start_functions(self._sandbox, folder, memory_bytes=self._memory_bytes)

    async def _make_room(self, owner: QueueOwner) -> None:
        """End the process that has been idle for longest."""
        idle = [(each.last_s, job_id) for job_id, each in self._jobs.items() if each.idle]
        if idle:
            await self._jobs[min(idle)[1]].end()


async def _try(
    functions: JobFunctions, plugin: NamedPlugin, rewards: Sequence[str], context: Context
) -> None:
    """Call a plug-in on a small input; `rewards`: names of the parts of the job's reward."""
    if plugin.kind == "filters":
        await functions.decided(plugin, trial_group(rewards))
        return
    if plugin.kind == "replays":
        await try_replay(OwnReplay(plugin, functions), trial_group(rewards), context)
        return
    batch = trial_batch(rewards)
    if plugin.field.startswith("experience.advantage_shaping"):
        batch = replace(batch, advantages=np.zeros(len(batch.rewards)))
    answer = await functions.advantages(plugin, batch, context, {})
    try:
        checked(answer, batch)
    except (TypeError, ValueError) as error:
        raise failed(plugin, f"{type(error).__name__}: {error}") from None


def _name(code: str | None, own: Sequence[NamedPlugin]) -> str:
    """The same for the same plug-ins, whoever asks."""
    parts = [[p.options_field, p.name, dict(p.options)] for p in own]
    return digest_of(json.dumps([code, parts], sort_keys=True).encode())
