"""One process that runs an environment for a job, and the calls in progress in it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from paceline.errors import InvalidError, PacelineError
from paceline.isolation.calls import AnswerStream, CallError, Calls, EndedError
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.sealed import start_sealed
from paceline.isolation.process import PlainProcess, open_command
from paceline.isolation.sandbox.sandbox import Sandbox

MODULE = "paceline.isolation.code.world_child"
_OF = "the process of the job's environment: "


class WorldError(PacelineError):
    """The job's code has raised, or returned what it must not."""


class WorldRefusedError(InvalidError):
    """The environment refuses its options or its task; no other attempt would go better."""


class ProcessEndedError(PacelineError):
    """The process has ended, maybe because of another call in it."""


class WorldProcess:
    """Sends calls and hands out their answers; any number may be in progress."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.kill = calls.kill

    @classmethod
    async def start(
        cls, sandbox: Sandbox, code: CodeFolder, target: str, *, threads: int, memory_bytes: int
    ) -> WorldProcess:
        """Start a process for the environment `target` of a code.

        Raises:
            UnavailableError: programs cannot be contained here.
        """
        process = await start_sealed(
            sandbox, code, MODULE, target, threads, memory_bytes=memory_bytes
        )
        return cls(Calls(process, what=_OF))

    @classmethod
    async def start_open(cls, target: str, *, threads: int) -> WorldProcess:
        """Start a process for an installed environment, with the network and files of this one."""
        process = await PlainProcess.start(open_command(MODULE, target, threads))
        return cls(Calls(process, what=_OF))

    @property
    def ended(self) -> bool:
        """Whether it can answer no more."""
        return self._calls.ended is not None

    @property
    def why(self) -> str:
        """Why it has ended; empty: it has not."""
        return "" if self._calls.ended is None else self._calls.ended.message

    @property
    def late(self) -> dict[int, float]:
        """Calls that nobody waits for, and since when."""
        return self._calls.late

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """The answer to a call.

        Raises:
            WorldRefusedError: the code has raised an `InvalidError`.
            WorldError: the code has raised anything else.
            ProcessEndedError: the process ends before it answers.
        """
        try:
            return (await self._calls.call(op, fields)).fields
        except (CallError, EndedError) as error:
            raise _of_worlds(error) from None

    @asynccontextmanager
    async def answers(self, op: str, **fields: Any) -> AsyncGenerator[WorldAnswers]:
        """The answers to a call with several."""
        try:
            async with self._calls.stream(op, fields) as stream:
                yield WorldAnswers(stream)
        except EndedError as error:
            raise _of_worlds(error) from None


class WorldAnswers:
    """The answers to one call."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream

    async def next(self) -> dict[str, Any]:
        """The next one; raises as `WorldProcess.call`."""
        try:
            return (await self._stream.next()).fields
        except (CallError, EndedError) as error:
            raise _of_worlds(error) from None


def _of_worlds(error: CallError | EndedError) -> PacelineError:
    if isinstance(error, EndedError):
        return ProcessEndedError(error.message)
    if InvalidError.__name__ in error.kinds:
        return WorldRefusedError(f"environment: {error.message}")
    return WorldError(f"environment: {error.message}")
