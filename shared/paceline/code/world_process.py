"""One process that runs an environment for a job, and the calls in progress in it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol

from paceline.code.folders import CodeFolder
from paceline.code.frames import FrameError, frame, read_frame
from paceline.code.open_process import OpenProcess
from paceline.code.sealed import start_sealed
from paceline.errors import InvalidError, PacelineError
from paceline.sandbox.sandbox import Sandbox

MODULE = "paceline.code.world_child"
_END_S = 5.0
_UNREAD = 8  # answers of a call with several


class WorldError(PacelineError):
    """The job's code has raised, or returned what it must not."""


class WorldRefusedError(InvalidError):
    """The environment refuses its options or its task; no other attempt would go better."""


class ProcessEndedError(PacelineError):
    """The process has ended, maybe because of another call in it."""


class FramedProcess(Protocol):
    """A process that reads frames and answers with frames: a `SealedProcess`, an `OpenProcess`."""

    stdout: asyncio.StreamReader

    def write(self, data: bytes) -> None:
        """Send bytes to it."""
        ...

    async def exit_text(self) -> str:
        """Wait for its end; how it has ended."""
        ...

    async def kill(self) -> None:
        """End it."""
        ...


class WorldProcess:
    """Sends calls and hands out their answers; any number may be in progress."""

    def __init__(
        self, process: FramedProcess, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended = False
        self.why = ""  # it has ended
        self._process = process
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._streams = set[int]()  # calls with several answers
        self._clock = clock
        self.late: dict[int, float] = {}  # calls that nobody waits for, and since when
        self._reading = asyncio.create_task(self._read(), name="world process")

    @classmethod
    async def start(
        cls, sandbox: Sandbox, code: CodeFolder, target: str, *, threads: int, memory_bytes: int
    ) -> WorldProcess:
        """Start a process for the environment `target` of a code.

        Raises:
            UnavailableError: programs cannot be contained here.
        """
        return cls(
            await start_sealed(sandbox, code, MODULE, target, threads, memory_bytes=memory_bytes)
        )

    @classmethod
    async def start_open(cls, target: str, *, threads: int) -> WorldProcess:
        """Start a process for an installed environment, with the network and files of this one."""
        return cls(await OpenProcess.start(MODULE, target, threads))

    @property
    def num_calls(self) -> int:
        """Calls in progress."""
        return len(self._answers)

    async def call(self, **request: Any) -> dict[str, Any]:
        """The answer to a call.

        Raises:
            WorldRefusedError: the code has raised an `InvalidError`.
            WorldError: the code has raised anything else.
            ProcessEndedError: the process ends before it answers.
        """
        async with self._asked(request, several=False) as answers:
            return await self.next(answers)

    def answers(self, **request: Any) -> AbstractAsyncContextManager[asyncio.Queue[dict[str, Any]]]:
        """A queue for the answers to a call with several, for `next`."""
        return self._asked(request, several=True)

    @asynccontextmanager
    async def _asked(
        self, request: Mapping[str, Any], *, several: bool
    ) -> AsyncGenerator[asyncio.Queue[dict[str, Any]]]:
        if self.ended:
            raise ProcessEndedError(self.why)
        number = next(self._numbers)
        queue = self._answers[number] = asyncio.Queue(_UNREAD if several else 0)
        if several:
            self._streams.add(number)
        self._process.write(frame({"id": number, **request}))
        try:
            yield queue
        finally:
            self._streams.discard(number)
            if self._answers.pop(number, None) is not None and not several:
                self.late[number] = self._clock()

    async def next(self, answers: asyncio.Queue[dict[str, Any]]) -> dict[str, Any]:
        """The next answer; raises as `call`."""
        answer = await answers.get()
        if "ended" in answer:
            raise ProcessEndedError(self.why)
        if answer.get("invalid") is True:
            raise WorldRefusedError(f"environment: {answer.get('error')}")
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
                await self._deliver(await read_frame(self._process.stdout))
        except FrameError as error:
            why = error.message
        await self._process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                why = f"{why} ({await self._process.exit_text()})"
        self._end(f"the process of the job's environment: {why}")

    async def _deliver(self, answer: dict[str, Any]) -> None:
        """Hand an answer to whoever waits for it; a process that sends others is to end."""
        number = answer.get("id")
        if not isinstance(number, int):
            raise FrameError(f"answered to {str(number)[:80]!r}")
        if number in self._streams:
            await self._answers[number].put(answer)
        elif (queue := self._answers.pop(number, None)) is not None:
            queue.put_nowait(answer)
        elif self.late.pop(number, None) is None:
            raise FrameError(f"answered to {number}, which nobody has asked")

    def _end(self, why: str) -> None:
        if not self.ended:
            self.ended, self.why = True, why
            for queue in self._answers.values():
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait({"ended": True})
