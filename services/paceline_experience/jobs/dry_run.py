"""Tries the plug-ins of a job in a child process, which may hang or die, before building them."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from paceline.config import JobSpec
from paceline.data import JobData
from paceline.data.errors import raise_answer
from paceline.errors import InvalidError
from paceline.isolation.calls import CallError, Calls, EndedError
from paceline.isolation.pool import ProcessPool
from paceline.isolation.process import PlainProcess, command
from paceline.platform.telemetry.logs import Log

NUM_CHILDREN = 2
START_TIMEOUT_S = 120.0  # until a child has done its imports
log = Log("dry-run")


class UntriedError(InvalidError):
    """The plug-ins of a job hung, exceeded memory or died before they could be checked."""


class TriesPlugins(Protocol):
    """Builds and calls the installed plug-ins that the ledger of a job will call."""

    async def check(self, spec: JobSpec, data: JobData) -> None:
        """Raises as `DryRun.check`."""
        ...


class DryRun:
    """Child processes that fork others, which build what a job names."""

    def __init__(self, *, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._command = command("paceline_experience.jobs.dry_run_child", str(memory_bytes))
        self._slots = asyncio.Semaphore(NUM_CHILDREN)
        self._children = ProcessPool(self._start)

    async def check(self, spec: JobSpec, data: JobData) -> None:
        """Build and call, in a child, all plug-ins that the ledger of a job will call.

        `data`: what its tasks may read.

        Raises:
            InvalidError: one refuses its options or returns something of a wrong type.
            UnavailableError: what its tasks read is away.
            UntriedError: it took longer than `timeout_s`, or the process ended.
        """
        async with self._slots:
            try:
                answer = await self._ask(spec, data)
            except _IdleEndedError:
                answer = await self._ask(spec, data)
        if "exit_code" in answer:
            code = answer["exit_code"]
            raise UntriedError(f"experience, tasks: the plug-ins ended their process with {code}")
        raise_answer(answer["wrong"])

    async def _ask(self, spec: JobSpec, data: JobData) -> dict[str, Any]:
        """What is wrong, as `answer_of`, empty: nothing; or the exit code of the fork."""
        async with self._children.taken() as child:
            was_idle, child.was_idle = child.was_idle, True
            try:
                async with asyncio.timeout(self._timeout_s):
                    return (await child.call("try", request_of(spec, data))).fields
            except TimeoutError:
                text = f"were not built within {self._timeout_s:g} s"
                raise UntriedError(f"experience, tasks: the plug-ins {text}") from None
            except (CallError, EndedError) as error:
                text = f"experience, tasks: the process that tries plug-ins: {error.message}"
                kind = (
                    _IdleEndedError if was_idle and isinstance(error, EndedError) else UntriedError
                )
                raise kind(text) from None

    async def _start(self) -> _Child:
        child = _Child(await PlainProcess.start(self._command))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child.call("ready")
        except TimeoutError:
            await child.kill()
            raise UntriedError(
                f"no process to try plug-ins in within {START_TIMEOUT_S:g} s"
            ) from None
        except EndedError as error:
            raise UntriedError(f"no process to try plug-ins in: {error.message}") from None
        except BaseException:
            await child.kill()
            raise
        return child

    async def close(self) -> None:
        """End the children."""
        await self._children.close()


class _IdleEndedError(UntriedError):
    """A child ended that had waited for work, which is no fault of the job."""


class _Child(Calls):
    was_idle = False
    """Whether it has been asked before."""


def request_of(spec: JobSpec, data: JobData) -> dict[str, Any]:
    """The fields of a call of a child."""
    return {"job": spec.model_dump(mode="json"), "data": data.as_json()}
