"""A process that runs functions of a job's ledger, and the call that is in progress in it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.code.arrays import ArrayMessage, Arrays, array_frame, read_array_frame
from paceline.code.errors import MAX_ERROR_CHARS
from paceline.code.folders import CodeFolder
from paceline.code.frames import FrameError
from paceline.code.sealed import start_sealed
from paceline.code.world_process import FramedProcess
from paceline.errors import PacelineError
from paceline.sandbox.sandbox import Sandbox

MODULE = "paceline.code.ledger_child"
_END_S = 5.0


class FunctionError(PacelineError):
    """The job's code has raised; its process is intact."""


class FunctionEndedError(PacelineError):
    """The process has ended, or has answered what is no answer; it is to be killed."""


class FunctionProcess:
    """Sends calls, one at a time. After a call that was cancelled it is to be killed."""

    def __init__(self, process: FramedProcess) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, sandbox: Sandbox, code: CodeFolder, *, memory_bytes: int
    ) -> FunctionProcess:
        """Start a process that may import a code.

        Raises:
            UnavailableError: programs cannot be contained here.
        """
        return cls(await start_sealed(sandbox, code, MODULE, memory_bytes=memory_bytes))

    async def call(
        self, fields: Mapping[str, Any], arrays: Arrays, *, most_bytes: int
    ) -> ArrayMessage:
        """The answer to a call, whose arrays have at most so many bytes.

        Raises:
            FunctionError: the code has raised.
            FunctionEndedError: there is no answer.
        """
        if arrays:  # a large batch takes longer to encode than a loop may be held up
            data = await asyncio.to_thread(array_frame, fields, arrays)
        else:
            data = array_frame(fields, arrays)
        self._process.write(data)
        try:
            answer = await read_array_frame(self._process.stdout, most_bytes=most_bytes)
        except FrameError as error:
            await self._process.kill()
            why = error.message
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    why = f"{why} ({await self._process.exit_text()})"
            raise FunctionEndedError(why) from None
        if "error" in answer.fields:
            raise FunctionError(str(answer.fields["error"])[:MAX_ERROR_CHARS])
        return answer

    async def kill(self) -> None:
        """End it."""
        await self._process.kill()
