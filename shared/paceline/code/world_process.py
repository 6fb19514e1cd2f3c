"""One sealed process that runs the environment of a job, and the calls in progress in it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.code.frames import FrameError, frame, read_frame
from paceline.code.sealed import start_sealed
from paceline.errors import PacelineError
from paceline.sandbox.sandbox import Sandbox
from paceline.sandbox.sealed_process import SealedProcess

MODULE = "paceline.code.world_child"
_END_S = 5.0


class WorldError(PacelineError):
    """The job's code has raised, or returned what it must not."""


class ProcessEndedError(PacelineError):
    """The process has ended, maybe because of another call in it."""


class WorldProcess:
    """Sends calls and hands out their answers; any number may be in progress."""

    def __init__(self, process: SealedProcess) -> None:
        self.ended = False
        self.why = ""  # it has ended
        self._process = process
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read(), name="world process")

    @classmethod
    async def start(
        cls, sandbox: Sandbox, folder: Path, target: str, *, threads: int, memory_bytes: int
    ) -> WorldProcess:
        """Start a process for the environment `target` in a folder.

        Raises:
            UnavailableError: programs cannot be contained here.
        """
        return cls(
            await start_sealed(sandbox, folder, MODULE, target, threads, memory_bytes=memory_bytes)
        )

    @property
    def num_calls(self) -> int:
        """Calls in progress."""
        return len(self._answers)

    async def call(self, **request: Any) -> dict[str, Any]:
        """The answer to a call.

        Raises:
            WorldError: the code has raised.
            ProcessEndedError: the process ends before it answers.
        """
        async with self.answers(**request) as answers:
            return await self.next(answers)

    @asynccontextmanager
    async def answers(self, **request: Any) -> AsyncGenerator[asyncio.Queue[dict[str, Any]]]:
        """A queue for the answers to a call, for `next`."""
        if self.ended:
            raise ProcessEndedError(self.why)
        number = next(self._numbers)
        queue = self._answers[number] = asyncio.Queue()
        self._process.write(frame({"id": number, **request}))
        try:
            yield queue
        finally:
            self._answers.pop(number, None)

    async def next(self, answers: asyncio.Queue[dict[str, Any]]) -> dict[str, Any]:
        """The next answer; raises as `call`."""
        answer = await answers.get()
        if "ended" in answer:
            raise ProcessEndedError(self.why)
        if "error" in answer:
            raise WorldError(f"environment: {answer['error']}")
        return answer

    async def kill(self, why: str = "it is not needed any more") -> None:
        """End it, and with it all calls in progress."""
        self._end(why)
        self._reading.cancel()
        await self._process.kill()

    async def _read(self) -> None:
        why = ""
        try:
            while True:
                answer = await read_frame(self._process.stdout)
                if (queue := self._answers.get(answer.get("id", -1))) is not None:
                    queue.put_nowait(answer)
        except FrameError as error:
            why = error.message
        except TypeError as error:  # an id that cannot be a key
            why = f"unreadable answer: {error}"
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                why = f"{why} ({await self._process.exit_text()})"
        self._end(f"the process of the job's environment: {why}")
        await self._process.kill()

    def _end(self, why: str) -> None:
        if not self.ended:
            self.ended, self.why = True, why
            for queue in self._answers.values():
                queue.put_nowait({"ended": True})
