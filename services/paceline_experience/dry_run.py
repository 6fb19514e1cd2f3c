"""Plug-ins of a job are tried in a process that may hang or die, before they are built here."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

from paceline.config import JobSpec
from paceline.errors import InvalidError
from paceline.family import Family, start_family
from paceline.logs import Log

# A plug-in may keep something from each job that it is tried with.
MOST_JOBS = 100
CHILDREN = 2
START_S = 120.0  # until a child has imported what it needs
log = Log("dry-run")


class UntriedError(InvalidError):
    """The plug-ins of a job hung, ate memory or died before anybody could say what they are."""


class _EndedError(UntriedError):
    """A child ended instead of an answer."""


class DryRun:
    """Children that build what a job names; those that are of no use any more are replaced."""

    def __init__(self, *, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._command = (
            *(sys.executable, "-P", "-m", "paceline_experience.dry_run_child"),
            str(memory_bytes),
        )
        self._places = asyncio.Semaphore(CHILDREN)
        self._idle: list[_Child] = []

    async def check(self, spec: JobSpec) -> None:
        """Build and call, elsewhere, all that the ledger of a job will call.

        Raises:
            InvalidError: something refuses its options, or does not answer as its kind should.
            UntriedError: it took longer than `timeout_s`, or the process ended.
        """
        async with self._places:
            idle = self._idle.pop() if self._idle else None
            try:
                wrong = await self._ask(idle or await self._start(), spec)
            except _EndedError:
                if idle is None:
                    raise
                # What an earlier job has left in it may have ended it.
                wrong = await self._ask(await self._start(), spec)
        if wrong:
            raise InvalidError(wrong)

    async def _ask(self, child: _Child, spec: JobSpec) -> str:
        """What a child says is wrong."""
        try:
            async with asyncio.timeout(self._timeout_s):
                wrong = await child.ask(spec.model_dump_json())
        except TimeoutError:
            await child.kill()
            text = f"were not built within {self._timeout_s:g} s"
            raise UntriedError(f"experience, tasks: the plug-ins {text}") from None
        except BaseException:
            await child.kill()
            raise
        # What was refused may have left memory behind.
        if wrong or child.num_jobs >= MOST_JOBS:
            await child.kill()
        else:
            self._idle.append(child)
        return wrong

    async def _start(self) -> _Child:
        child = _Child(await start_family(self._command))
        try:
            async with asyncio.timeout(START_S):
                await child.hear()
        except BaseException as error:
            await child.kill()
            if isinstance(error, TimeoutError):
                raise UntriedError(f"no process to try plug-ins in within {START_S:g} s") from None
            raise
        return child

    async def close(self) -> None:
        """End the children."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(child.kill() for child in idle))


class _Child:
    def __init__(self, family: Family) -> None:
        self._family = family
        self.num_jobs = 0

    async def ask(self, job: str) -> str:
        """What is wrong with a job; empty if nothing is."""
        self.num_jobs += 1
        stdin = self._family.process.stdin
        assert stdin is not None
        with suppress(ConnectionError):  # what it has to say of its end is read
            stdin.write(job.encode() + b"\n")
            await stdin.drain()
        return await self.hear()

    async def hear(self) -> str:
        """The next line."""
        process = self._family.process
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            code = await process.wait()
            raise _EndedError(f"experience, tasks: the plug-ins ended their process with {code}")
        return str(json.loads(line))

    async def kill(self) -> None:
        """End it and all that it has started."""
        await self._family.kill()
