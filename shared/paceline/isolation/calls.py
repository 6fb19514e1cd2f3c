"""Calls to functions of another process: any number in progress, each with one end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from paceline.errors import PacelineError
from paceline.isolation.child import ERROR, ID, KINDS, MORE, OP
from paceline.isolation.frames import MAX_JSON_BYTES, Frame, FrameError, frame
from paceline.isolation.process import ChildProcess
from paceline.isolation.reading import read_fields, read_parts

END_S = 5.0  # until a process that was killed has told how it has ended
_UNREAD = 8  # answers of a stream
_IN_A_THREAD_BYTES = 64 << 10  # of parts: more would hold up a loop
_MAX_ERROR_CHARS = 4000
_NOTHING: Mapping[str, Any] = {}


class CallError(PacelineError):
    """The function has raised; its process is intact. `kinds`: its error classes of Paceline."""

    def __init__(self, message: str, kinds: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.kinds = kinds


class EndedError(PacelineError):
    """The process has ended, or has answered what is no answer. `how`: its exit, if it is known."""

    def __init__(self, message: str, how: str = "") -> None:
        super().__init__(message)
        self.how = how


class AnswerStream:
    """The answers to one call that has several."""

    def __init__(self) -> None:
        self.over = False
        """Whether the last answer was handed out."""
        self._answers: asyncio.Queue[tuple[bool, Frame | PacelineError]] = asyncio.Queue(_UNREAD)

    async def next(self) -> Frame:
        """The next answer.

        Raises:
            CallError: the function has raised.
            EndedError: the process has ended, or has answered less often than it should.
        """
        if self.over:
            raise EndedError("answered less than it was asked for")
        is_last, answer = await self._answers.get()
        self.over = is_last
        if isinstance(answer, PacelineError):
            raise answer
        return answer

    async def put(self, answer: Frame | PacelineError, *, is_last: bool) -> None:
        """Hand an answer or an error over, once there is room for it."""
        await self._answers.put((is_last, answer))

    def end(self, error: PacelineError) -> None:
        """End the stream at once, in place of an answer if there is no room."""
        if self._answers.full():
            self._answers.get_nowait()
        self._answers.put_nowait((True, error))

    def drop(self) -> None:
        """Forget what was not handed out, so that nobody waits for room."""
        self.over = True
        while not self._answers.empty():
            self._answers.get_nowait()


class Calls:
    """Sends calls to a process and hands out their answers, until it ends.

    Whatever is no answer ends it. A call that was given up is `late` until it is answered; the
    process goes on, unless somebody kills it.
    """

    def __init__(
        self,
        process: ChildProcess,
        *,
        what: str = "",
        most_bytes: int = MAX_JSON_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what`: begins the message of its end. `most_bytes`: of the JSON of an answer."""
        self.broken = False
        """Whether nothing arrives any more; its calls hear of it once it has been killed."""
        self.ended: EndedError | None = None
        self.late: dict[int, float] = {}
        """Calls that nobody waits for, and since when."""
        self._process = process
        self._what = what
        self._most_bytes = most_bytes
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Frame] | AnswerStream] = {}
        self._bounds: dict[int, int] = {}  # bytes of parts, of all calls without a last answer
        self._reading = asyncio.create_task(self._read(), name="calls")

    @property
    def num_calls(self) -> int:
        """Calls in progress."""
        return len(self._waiting)

    async def call(
        self,
        op: str,
        fields: Mapping[str, Any] = _NOTHING,
        parts: Mapping[str, Any] = _NOTHING,
        *,
        most_bytes: int = 0,
    ) -> Frame:
        """The answer of a function, whose parts have at most so many bytes.

        Raises:
            CallError: it has raised.
            EndedError: the process ends before it answers.
        """
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        number = await self._send(answer, {OP: op, **fields}, parts, most_bytes)
        try:
            return await answer
        finally:
            if self._waiting.pop(number, None) is not None:
                self.late[number] = self._clock()

    @asynccontextmanager
    async def stream(
        self,
        op: str,
        fields: Mapping[str, Any] = _NOTHING,
        parts: Mapping[str, Any] = _NOTHING,
        *,
        most_bytes: int = 0,
    ) -> AsyncGenerator[AnswerStream]:
        """The answers of a function that has several; each has parts of at most so many bytes.

        Raises:
            EndedError: the process has ended.
        """
        stream = AnswerStream()
        number = await self._send(stream, {OP: op, **fields}, parts, most_bytes)
        try:
            yield stream
        finally:
            if self._waiting.pop(number, None) is not None:
                self.late[number] = self._clock()
            stream.drop()

    async def kill(self, why: str = "it is not needed any more") -> None:
        """End the process, and with it all calls in progress."""
        self._end(EndedError(f"{self._what}{why}"))
        self._reading.cancel()
        await self._process.kill()

    async def _send(
        self,
        answer: asyncio.Future[Frame] | AnswerStream,
        fields: Mapping[str, Any],
        parts: Mapping[str, Any],
        most_bytes: int,
    ) -> int:
        number = next(self._numbers)
        asked = {ID: number, **fields}
        if parts and sum(map(_num_bytes, parts.values())) > _IN_A_THREAD_BYTES:
            data = await asyncio.to_thread(frame, asked, parts)
        else:
            data = frame(asked, parts)
        if self.ended is not None:
            raise self.ended
        self._waiting[number] = answer
        self._bounds[number] = most_bytes
        self._process.write(data)
        return number

    async def _read(self) -> None:
        try:
            while True:
                await self._deliver()
        except FrameError as error:
            why = error.message
        self.broken = True
        await self._process.kill()
        how = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                how = await self._process.exit_text()
        self._end(EndedError(f"{self._what}{why}" + (f" ({how})" if how else ""), how))

    async def _deliver(self) -> None:
        """Hand the next answer to whoever waits for it; a process that sends others is to end."""
        stdout = self._process.stdout
        fields = await read_fields(stdout, most_bytes=self._most_bytes)
        number = fields.pop(ID, None)
        if not isinstance(number, int):
            raise FrameError(f"answered to {str(number)[:80]!r}")
        bound = self._bounds.get(number)
        if bound is None:
            raise FrameError(f"answered to {number}, which nobody has asked")
        message = Frame(fields, await read_parts(stdout, fields, most_bytes=bound))
        waiting = self._waiting.get(number)
        if fields.pop(MORE, False):
            if isinstance(waiting, asyncio.Future):
                raise FrameError(f"answered to {number} more than once")
            if waiting is not None:
                await waiting.put(message, is_last=False)
            return
        del self._bounds[number]
        self._waiting.pop(number, None)
        self.late.pop(number, None)
        if waiting is not None:
            await _finish(waiting, message)

    def _end(self, error: EndedError) -> None:
        self.broken = True
        if self.ended is None:
            self.ended = error
            waiting, self._waiting = self._waiting, {}
            for each in waiting.values():
                if isinstance(each, AnswerStream):
                    each.end(error)
                elif not each.done():
                    each.set_exception(error)


def answer_of(message: Frame) -> Frame | CallError:
    """The error that an answer tells, or the answer itself."""
    if ERROR not in message.fields:
        return message
    kinds = message.fields.get(KINDS)
    names = cast("list[Any]", kinds) if isinstance(kinds, list) else []
    return CallError(str(message.fields[ERROR])[:_MAX_ERROR_CHARS], frozenset(map(str, names)))


async def _finish(waiting: asyncio.Future[Frame] | AnswerStream, message: Frame) -> None:
    answer = answer_of(message)
    if isinstance(waiting, AnswerStream):
        await waiting.put(answer, is_last=True)
    elif not waiting.done():
        if isinstance(answer, CallError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)


def _num_bytes(part: Any) -> int:
    return part.nbytes if hasattr(part, "nbytes") else len(part)
