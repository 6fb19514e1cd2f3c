"""What the ledger of one job calls of its code, in a sealed process that stays between calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

from paceline.config import JobSpec
from paceline.config.named import NamedPlugin
from paceline.config.needs import refusal
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.isolation.calls import CallError, Calls, EndedError
from paceline.isolation.cap import ProcessCap, Release
from paceline.isolation.code.ledger_messages import (
    Arrays,
    advantages_of,
    batch_arrays,
    context_fields,
    group_fields,
)
from paceline.isolation.frames import MAX_ERROR_CHARS, Frame
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.telemetry.logs import Log
from paceline.plugins import Advantages, Context, EpisodeBatch, FinishedGroup, Keep, Repair
from paceline_experience.jobs.dry_run import UntriedError
from paceline_experience.ledger.filters.answer import FilterDecision

_ATTEMPTS = 2  # a process may have died through no fault of the call
_MAX_PROBLEM_CHARS = 2000
_NOTABLE_S = 1.0  # without an answer
_OVER = "the job is over"
Start = Callable[[], Awaitable[Calls]]
log = Log("own-code")


class JobFunctions:
    """What the ledger of one job calls of its code; a process is started when one is called."""

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
        self._process: Calls | None = None
        self._release: Release | None = None
        self._closed = False
        self._needs: dict[str, frozenset[str]] = {}
        self._asked: tuple[NamedPlugin, float] | None = None

    @property
    def idle(self) -> bool:
        """Whether there is a process, and no call in it."""
        return self._process is not None and not self._calling.locked()

    @property
    def unanswered(self) -> str:
        """See `OwnParts`."""
        if self._asked is None:
            return ""
        plugin, since_s = self._asked
        waited_s = self._clock() - since_s
        told = f"{plugin.options_field}: {plugin.name} has not answered for {waited_s:.0f} s"
        return told if waited_s >= _NOTABLE_S else ""

    def learn(self, needs: Mapping[str, Sequence[str]]) -> None:
        """What `describe` has found before."""
        self._needs = {field: frozenset(each) for field, each in needs.items()}

    async def describe(
        self, own: Sequence[NamedPlugin], spec: JobSpec, *, may_lack_packages: bool = False
    ) -> dict[str, list[str]]:
        """Import `own`, check their options; returns what `OwnParts.needs` says, by field.

        `may_lack_packages`: those that lack one are left out, instead of refused.

        Raises:
            InvalidError: one cannot be imported, refuses its options or needs what the job lacks.
        """
        wrong: list[str] = []
        found: dict[str, list[str]] = {}
        for each in own:
            answer = await self._described(each, may_lack_packages=may_lack_packages)
            if answer.get("lacks_package"):
                continue
            lines, needs = _texts(answer.get("wrong")), _texts(answer.get("needs"))
            found[each.options_field] = [*needs, *_texts(answer.get("methods"))]
            plugin = f"{each.kind.removesuffix('s')} {each.name!r}"
            refused = (refusal(n, spec, field=each.options_field, plugin=plugin) for n in needs)
            wrong += lines or filter(None, refused)
        if wrong:
            raise InvalidError("; ".join(wrong)[:_MAX_PROBLEM_CHARS])
        self.learn(found)
        return found

    async def check_called_by_workers(
        self, called: Sequence[NamedPlugin], *, may_lack_packages: bool = False
    ) -> list[str]:
        """Import rewards and the transform, which workers call, and check how they are called.

        Returns why some could not be tried: workers may have more time.

        Raises:
            InvalidError: one cannot be imported, takes other arguments or refuses its options.
        """
        wrong: list[str] = []
        untried: list[str] = []
        may_lack_packages = may_lack_packages or not _has_packages_of_rewards()
        for each in called:
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
        fields = {**where, "kind": plugin.kind}
        return (await self._call(plugin, "describe", {**fields, **asked})).fields

    def needs(self, plugin: NamedPlugin) -> frozenset[str]:
        """See `OwnParts`."""
        return self._needs.get(plugin.options_field, frozenset())

    async def ask(
        self, plugin: NamedPlugin, op: str, fields: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See `OwnParts`."""
        return (await self._call(plugin, op, fields)).fields

    async def decided(self, plugin: NamedPlugin, group: FinishedGroup) -> FilterDecision:
        """See `OwnParts`."""
        answer = await self._call(plugin, "filter", {"group": group_fields(group)})
        size = len(group.rewards)
        kept, again = answer.fields.get("kept"), answer.fields.get("repair")
        try:
            repair = Repair(_listed(again)).of(size) if again is not None else ()
            return FilterDecision(() if kept == [] else Keep(_listed(kept)).of(size), repair=repair)
        except (TypeError, ValueError) as error:
            raise failed(plugin, f"{type(error).__name__}: {error}") from None

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
        arrays = batch_arrays(batch)
        answer = await self._call(plugin, "advantage", given, arrays, most_bytes=most_bytes)
        try:
            return advantages_of(answer.fields, answer.parts)
        except TypeError as error:
            raise failed(plugin, str(error)) from None

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
        op: str,
        fields: Mapping[str, Any],
        arrays: Arrays | None = None,
        *,
        most_bytes: int = 0,
    ) -> Frame:
        asked = {**fields, "target": plugin.name, "options": dict(plugin.options)}
        async with self._called(plugin):
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return await self._attempt(op, asked, arrays or {}, most_bytes)
                except CallError as error:
                    raise failed(plugin, error.message[:MAX_ERROR_CHARS]) from None
                except TimeoutError:
                    late = f"did not answer within {self._timeout_s:g} s"
                    raise _untried(plugin, late) from None
                except EndedError as error:
                    log.warning(
                        "a process of a job's code is replaced", error=error, attempt=attempt
                    )
                    if attempt == _ATTEMPTS:
                        raise _untried(plugin, error.message) from None
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _called(self, plugin: NamedPlugin) -> AsyncGenerator[None]:
        """One call at a time."""
        async with self._calling:
            self._asked = (plugin, self._clock())
            try:
                yield
            finally:
                self._asked = None

    async def _attempt(
        self, op: str, fields: Mapping[str, Any], arrays: Arrays, most_bytes: int
    ) -> Frame:
        process = self._process or await self._started()
        intact = False
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await process.call(op, fields, arrays, most_bytes=most_bytes)
            intact = True
        except CallError:
            intact = True
            raise
        finally:
            self.last_s = self._clock()
            if not intact or self._cap.wanted:
                await self.end()
        return answer

    async def _started(self) -> Calls:
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


def _texts(value: Any) -> Sequence[str]:
    """A list of strings that the job's code has sent; empty if it is something else."""
    if not isinstance(value, list):
        return ()
    return [str(each) for each in value][:100]


def _listed(value: Any) -> Sequence[Any]:
    return cast(list[Any], value) if isinstance(value, list) else (value,)


def failed(plugin: NamedPlugin, why: str) -> InvalidError:
    """What is wrong with a plug-in."""
    return InvalidError(f"{plugin.options_field}: {plugin.name}: {why}")


def _untried(plugin: NamedPlugin, why: str) -> UntriedError:
    return UntriedError(f"{plugin.options_field}: {plugin.name}: {why}")


@cache
def _has_packages_of_rewards() -> bool:
    """Reward workers may have other packages, except where all services share one environment."""
    return find_spec("math_verify") is not None
