"""Filters and advantages that came with a job, in one sealed process for each job."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Protocol, cast

import numpy as np

from paceline.code.arrays import ArrayMessage, Arrays
from paceline.code.folders import CodeFolder
from paceline.code.function_process import FunctionEndedError, FunctionError, FunctionProcess
from paceline.code.ledger_messages import (
    advantages_of,
    batch_arrays,
    context_fields,
    group_fields,
)
from paceline.code.process_cap import ProcessCap, Release
from paceline.config import JobSpec
from paceline.config.named import NamedPlugin, own_called_by_workers, own_ledger_parts
from paceline.config.needs import refusal
from paceline.digest import digest_of
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.fair_queue import QueueOwner
from paceline.plugins import Advantages, Context, EpisodeBatch, FinishedGroup, Keep, Repair
from paceline.sandbox.sandbox import Sandbox
from paceline.telemetry.logs import Log
from paceline.telemetry.metrics import Metrics
from paceline_experience.jobs.dry_run import UntriedError
from paceline_experience.ledger.advantages.episodes import trial_batch
from paceline_experience.ledger.advantages.estimate import checked
from paceline_experience.ledger.filters.answer import FilterDecision
from paceline_experience.ledger.filters.chain import trial_group
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts

IDLE_S = 60.0
_TRIED_AT_A_TIME = 2  # jobs of a tenant
_ATTEMPTS = 2  # a process may have died through no fault of the call
_MAX_PROBLEM_CHARS = 2000
_OVER = "the job is over"
Start = Callable[[], Awaitable[FunctionProcess]]
log = Log("own-code")


class KeepsNeeds(Protocol):
    """Where it is kept what plug-ins of code declare, by their fields."""

    async def needs(self, name: str) -> Mapping[str, Sequence[str]] | None:
        """The needs of these plug-ins; None: they are not kept."""
        ...

    async def put_needs(self, name: str, needs: Mapping[str, Sequence[str]]) -> None:
        """Keep them."""
        ...


class JobFunctions:
    """The filters and advantages of one job; its process is started when one is called."""

    def __init__(
        self,
        start: Start,
        *,
        cap: ProcessCap,
        owner: QueueOwner,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: of a call."""
        self.last_s = clock()
        self._start = start
        self._cap = cap
        self._owner = owner
        self._timeout_s = timeout_s
        self._clock = clock
        self._calling = asyncio.Lock()
        self._process: FunctionProcess | None = None
        self._release: Release | None = None
        self._closed = False
        self._needs: dict[str, frozenset[str]] = {}

    @property
    def idle(self) -> bool:
        """Whether there is a process, and no call in it."""
        return self._process is not None and not self._calling.locked()

    def learn(self, needs: Mapping[str, Sequence[str]]) -> None:
        """What `describe` has found before."""
        self._needs = {field: frozenset(each) for field, each in needs.items()}

    async def describe(
        self, spec: JobSpec, *, may_lack_packages: bool = False
    ) -> dict[str, list[str]]:
        """Import them and check their options; returns what each needs, by field.

        `may_lack_packages`: those that lack one are left out, instead of refused.

        Raises:
            InvalidError: one cannot be imported, refuses its options or needs what the job lacks.
        """
        wrong: list[str] = []
        found: dict[str, list[str]] = {}
        for each in own_ledger_parts(spec):
            answer = await self._described(each, may_lack_packages=may_lack_packages)
            if answer.get("lacks_package"):
                continue
            lines, needs = _texts(answer.get("wrong")), _texts(answer.get("needs"))
            found[each.options_field] = [*needs]
            plugin = f"{each.kind.removesuffix('s')} {each.name!r}"
            refused = (refusal(n, spec, field=each.options_field, plugin=plugin) for n in needs)
            wrong += lines or filter(None, refused)
        if wrong:
            raise InvalidError("; ".join(wrong)[:_MAX_PROBLEM_CHARS])
        self.learn(found)
        return found

    async def check_called_by_workers(
        self, spec: JobSpec, *, may_lack_packages: bool = False
    ) -> list[str]:
        """Import rewards and the transform, which workers call, and check how they are called.

        Returns why some could not be tried: workers may have more time.

        Raises:
            InvalidError: one cannot be imported, takes other arguments or refuses its options.
        """
        wrong: list[str] = []
        untried: list[str] = []
        may_lack_packages = may_lack_packages or not _has_packages_of_rewards()
        for each in own_called_by_workers(spec):
            try:
                answer = await self._described(each, may_lack_packages=may_lack_packages)
                wrong += _texts(answer.get("wrong"))
            except (UnavailableError, UntriedError) as error:
                log.warning("code of the job is not tried", function=each.name, error=error)
                untried.append(error.message)
        if wrong:
            raise InvalidError("; ".join(wrong)[:_MAX_PROBLEM_CHARS])
        return untried

    async def _described(self, plugin: NamedPlugin, **asked: bool) -> Mapping[str, Any]:
        where = {"named": plugin.field, "field": plugin.options_field}
        fields = {"op": "describe", **where, "kind": plugin.kind}
        return (await self._call(plugin, {**fields, **asked})).fields

    def needs(self, plugin: NamedPlugin) -> frozenset[str]:
        """See `OwnParts`."""
        return self._needs.get(plugin.options_field, frozenset())

    async def decided(self, plugin: NamedPlugin, group: FinishedGroup) -> FilterDecision:
        """See `OwnParts`."""
        answer = await self._call(plugin, {"op": "filter", "group": group_fields(group)})
        size = len(group.rewards)
        kept, again = answer.fields.get("kept"), answer.fields.get("repair")
        try:
            repair = Repair(_listed(again)).of(size) if again is not None else ()
            return FilterDecision(() if kept == [] else Keep(_listed(kept)).of(size), repair=repair)
        except (TypeError, ValueError) as error:
            raise _failed(plugin, f"{type(error).__name__}: {error}") from None

    async def advantages(
        self,
        plugin: NamedPlugin,
        batch: EpisodeBatch,
        context: Context,
        memory: Mapping[str, str],
    ) -> Advantages:
        """See `OwnParts`."""
        given = {"answers": list(batch.answers), "context": context_fields(context, memory)}
        most_bytes = 8 * (2 * len(batch.rewards) + int(batch.lengths.sum()))
        asked = {"op": "advantage", **given}
        answer = await self._call(plugin, asked, batch_arrays(batch), most_bytes=most_bytes)
        try:
            return advantages_of(answer.fields, answer.arrays)
        except TypeError as error:
            raise _failed(plugin, str(error)) from None

    async def close(self) -> None:
        """Kill the process, and start none any more."""
        self._closed = True
        await self.end()

    async def end(self) -> None:
        """Kill the process; the next call starts another."""
        process, release = self._process, self._release
        self._process = self._release = None
        if process is not None:
            await process.kill()
        if release is not None:
            release()

    async def _call(
        self,
        plugin: NamedPlugin,
        fields: Mapping[str, Any],
        arrays: Arrays | None = None,
        *,
        most_bytes: int = 0,
    ) -> ArrayMessage:
        asked = {**fields, "target": plugin.name, "options": dict(plugin.options)}
        async with self._calling:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return await self._attempt(asked, arrays or {}, most_bytes)
                except FunctionError as error:
                    raise _failed(plugin, error.message) from None
                except TimeoutError:
                    late = f"did not answer within {self._timeout_s:g} s"
                    raise _untried(plugin, late) from None
                except FunctionEndedError as error:
                    log.warning(
                        "a process of a job's code is replaced", error=error, attempt=attempt
                    )
                    if attempt == _ATTEMPTS:
                        raise _untried(plugin, error.message) from None
        raise AssertionError("unreachable")

    async def _attempt(
        self, fields: Mapping[str, Any], arrays: Arrays, most_bytes: int
    ) -> ArrayMessage:
        process = self._process or await self._started()
        intact = False
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await process.call(fields, arrays, most_bytes=most_bytes)
            intact = True
        except FunctionError:
            intact = True
            raise
        finally:
            self.last_s = self._clock()
            if not intact or self._cap.wanted:
                await self.end()
        return answer

    async def _started(self) -> FunctionProcess:
        if self._closed:
            raise UnavailableError(_OVER)
        release = await self._cap.take(self._owner)
        try:
            process = await self._start()
        except PacelineError as error:  # packages may be installed later, a sandbox start again
            release()
            raise UnavailableError(f"the job's code: {error.message}") from None
        except BaseException:
            release()
            raise
        self._process, self._release = process, release
        if self._closed:  # meanwhile
            await self.end()
            raise UnavailableError(_OVER)
        return process


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
        self._cap = ProcessCap(max_processes, metrics=metrics, make_room=self._make_room)
        self._call_s = call_s
        self._check_s = check_s
        self._idle_s = idle_s
        self._clock = clock
        self._jobs: dict[str, JobFunctions] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}  # by tenant
        self._ending = set[asyncio.Task[None]]()

    async def check(self, spec: JobSpec) -> list[str]:
        """Import them in a process of their own, check their options and call each once.

        What workers call is imported and checked, but not called: its input is up to the tasks.
        Returns why some of them could not be tried.

        Raises:
            InvalidError: there is something wrong with one.
            UnavailableError: this machine cannot contain the code.
        """
        parts = own_ledger_parts(spec)
        if not parts and not own_called_by_workers(spec):
            return []
        lacks = self._lacks_packages
        call_s = min(self._call_s, self._check_s)
        async with self._slots.setdefault(spec.tenant, asyncio.Semaphore(_TRIED_AT_A_TIME)):
            functions = self._made(spec, QueueOwner(spec.tenant), call_s)
            try:
                untried = await functions.check_called_by_workers(spec, may_lack_packages=lacks)
                found = await functions.describe(spec, may_lack_packages=lacks)
                for each in parts:
                    if each.options_field in found:
                        await _try(functions, each, spec)
            finally:
                await functions.close()
        if parts:
            await self._store.put_needs(_name(spec), found)
        return untried

    async def of(self, job_id: str, spec: JobSpec) -> OwnParts:
        """Those of a job, ready to be called until `end`.

        Raises:
            InvalidError: one can no longer be imported.
            UnavailableError: this machine cannot contain the code.
        """
        if not own_ledger_parts(spec):
            return NO_PARTS
        functions = self._made(spec, QueueOwner(spec.tenant, job_id), self._call_s)
        found = await self._store.needs(_name(spec))
        if found is not None:  # a restart need not wait for the code of every job
            functions.learn(found)
        else:
            try:
                found = await functions.describe(spec)
            except BaseException:
                await functions.close()
                raise
            await self._store.put_needs(_name(spec), found)
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

    def _made(self, spec: JobSpec, owner: QueueOwner, timeout_s: float) -> JobFunctions:
        assert spec.code is not None
        start = partial(self._start, spec.code.digest)
        return JobFunctions(
            start, cap=self._cap, owner=owner, timeout_s=timeout_s, clock=self._clock
        )

    async def _start(self, code: str) -> FunctionProcess:
        folder = await self._folder_of(code)
        return await FunctionProcess.start(self._sandbox, folder, memory_bytes=self._memory_bytes)

    async def _make_room(self, owner: QueueOwner) -> None:
        """End the process that has been idle for longest."""
        idle = [(each.last_s, job_id) for job_id, each in self._jobs.items() if each.idle]
        if idle:
            await self._jobs[min(idle)[1]].end()


async def _try(functions: JobFunctions, plugin: NamedPlugin, spec: JobSpec) -> None:
    """Call a plug-in on a small input."""
    parts = [part.part for part in spec.reward]
    if plugin.kind == "filters":
        await functions.decided(plugin, trial_group(parts))
        return
    batch = trial_batch(parts)
    if plugin.field.startswith("experience.advantage_shaping"):
        batch = replace(batch, advantages=np.zeros(len(batch.rewards)))
    context = Context(0, spec.stop.steps, spec.tasks.seed)
    answer = await functions.advantages(plugin, batch, context, {})
    try:
        checked(answer, batch)
    except (TypeError, ValueError) as error:
        raise _failed(plugin, f"{type(error).__name__}: {error}") from None


def _name(spec: JobSpec) -> str:
    """The same for the same plug-ins, whoever asks."""
    assert spec.code is not None
    parts = [[p.options_field, p.name, dict(p.options)] for p in own_ledger_parts(spec)]
    return digest_of(json.dumps([spec.code.digest, parts], sort_keys=True).encode())


def _texts(value: Any) -> Sequence[str]:
    """A list of strings that the job's code has sent; empty if it is something else."""
    if not isinstance(value, list):
        return ()
    return [str(each) for each in value][:100]


def _listed(value: Any) -> Sequence[Any]:
    return cast(list[Any], value) if isinstance(value, list) else (value,)


def _failed(plugin: NamedPlugin, why: str) -> InvalidError:
    return InvalidError(f"{plugin.options_field}: {plugin.name}: {why}")


def _untried(plugin: NamedPlugin, why: str) -> UntriedError:
    return UntriedError(f"{plugin.options_field}: {plugin.name}: {why}")


@cache
def _has_packages_of_rewards() -> bool:
    """Reward workers may have other packages, except where all services share one environment."""
    return find_spec("math_verify") is not None
