"""Tries the plug-ins of a job in a child process, which may hang or die, before building them."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any, Protocol

from paceline.config import JobSpec
from paceline.data import JobData
from paceline.data.errors import raise_answer
from paceline.errors import InvalidError
from paceline.server.process_group import ProcessGroup, start_process_group
from paceline.telemetry.logs import Log

NUM_CHILDREN = 2
START_TIMEOUT_S = 120.0  # until a child has done its imports
log = Log("dry-run")


class UntriedError(InvalidError):
    """The plug-ins of a job hung, exceeded memory or died before they could be checked."""


class _EndedError(UntriedError):
    """A child ended without an answer."""


class TriesPlugins(Protocol):
    """Builds and calls the installed plug-ins that the ledger of a job will call."""

    async def check(self, spec: JobSpec, data: JobData) -> None:
        """Raises as `DryRun.check`."""
        ...


class DryRun:
    """Child processes that fork others, which build what a job names."""

    def __init__(self, *, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._command = (
            *(sys.executable, "-P", "-m", "paceline_experience.jobs.dry_run_child"),
            str(memory_bytes),
        )
        self._slots = asyncio.Semaphore(NUM_CHILDREN)
        self._idle: list[_Child] = []

    async def check(self, spec: JobSpec, data: JobData) -> None:
        """Build and call, in a child, all plug-ins that the ledger of a job will call.

        `data`: what its tasks may read.

        Raises:
            InvalidError: one refuses its options or returns something of a wrong type.
            UnavailableError: what its tasks read is away.
            UntriedError: it took longer than `timeout_s`, or the process ended.
        """
        request = request_of(spec, data)
        async with self._slots:
            idle = self._idle.pop() if self._idle else None
            try:
                answer = await self._ask(idle or await self._start(), request)
            except _EndedError:
                if idle is None:
                    raise
                answer = await self._ask(await self._start(), request)
        if isinstance(answer, int):
            raise UntriedError(f"experience, tasks: the plug-ins ended their process with {answer}")
        raise_answer(answer)

    async def _ask(self, child: _Child, request: str) -> list[str] | int:
        """What is wrong, as `answer_of`, empty: nothing; or the exit code of the fork."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await child.ask(request)
        except TimeoutError:
            await child.kill()
            text = f"were not built within {self._timeout_s:g} s"
            raise UntriedError(f"experience, tasks: the plug-ins {text}") from None
        except BaseException:
            await child.kill()
            raise
        self._idle.append(child)
        return answer

    async def _start(self) -> _Child:
        child = _Child(await start_process_group(self._command))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child.read()
        except BaseException as error:
            await child.kill()
            if isinstance(error, TimeoutError):
                raise UntriedError(
                    f"no process to try plug-ins in within {START_TIMEOUT_S:g} s"
                ) from None
            raise
        return child

    async def close(self) -> None:
        """End the children."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(child.kill() for child in idle))


def request_of(spec: JobSpec, data: JobData) -> str:
    """What a child is asked, a line of JSON."""
    return json.dumps({"job": spec.model_dump(mode="json"), "data": data.as_json()})


class _Child:
    def __init__(self, family: ProcessGroup) -> None:
        self._family = family

    async def ask(self, request: str) -> list[str]:
        """What is wrong with a job and its data, a line of JSON; empty: nothing."""
        stdin = self._family.process.stdin
        assert stdin is not None
        with suppress(ConnectionError):  # a dead child is noticed when reading
            stdin.write(request.encode() + b"\n")
            await stdin.drain()
        return await self.read()

    async def read(self) -> Any:
        """Its next answer."""
        process = self._family.process
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            code = await process.wait()
            raise _EndedError(
                f"experience, tasks: the process that tries plug-ins ended with {code}"
            )
        return json.loads(line)

    async def kill(self) -> None:
        """Kill it and all processes that it has started."""
        await self._family.kill()
