"""Calls to functions of another process: any number in progress, each with one end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

from paceline.errors import PacelineError
from paceline.isolation.child import ERROR, ID, KINDS, MORE, OP
from paceline.isolation.frames import MAX_JSON_BYTES, Frame, FrameError, frame
from paceline.isolation.process import ChildProcess
from paceline.isolation.reading import FrameReader

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
    """The answers to one call that has several, inside its context."""

    def __init__(self, calls: Calls, request: CallRequest) -> None:
        self.over = False
        """Whether the last answer was handed out, or nobody wants one any more."""
        self._calls = calls
        self._request = request
        self._number = -1
        self._answers: deque[tuple[bool, Frame | PacelineError]] = deque()
        self._arrival: asyncio.Future[None] | None = None  # somebody waits for it

    async def __aenter__(self) -> AnswerStream:
        """Send the request; raises `EndedError` if the process has ended."""
        self._number = await self._calls.send(self, self._request)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Forget what was not handed out."""
        self.over = True
        self._answers.clear()
        self._calls.give_up(self._number)
        self._calls.go_on(self)

    @property
    def is_full(self) -> bool:
        """Whether its reader is behind."""
        return len(self._answers) >= _UNREAD and not self.over

    async def next(self) -> Frame:
        """The next answer.

        Raises:
            CallError: the function has raised.
            EndedError: the process has ended, or has answered less often than it should.
        """
        if self.over:
            raise EndedError("answered less than it was asked for")
        while not self._answers:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        self.over, answer = self._answers.popleft()
        self._calls.go_on(self)
        if isinstance(answer, PacelineError):
            raise answer
        return answer

    def put(self, answer: Frame | PacelineError, *, is_last: bool) -> None:
        """Hand an answer or an error over."""
        if not self.over:
            self._answers.append((is_last, answer))
            if self._arrival is not None and not self._arrival.done():
                self._arrival.set_result(None)


class CallRequest(NamedTuple):
    """Parts of a call that are sent, and the bytes of parts that each answer may have."""

    op: str
    fields: Mapping[str, Any]
    parts: Mapping[str, Any]
    most_bytes: int


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
        ended: str = "its process has ended",
        most_bytes: int = MAX_JSON_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what`: begins the message of its end, and `ended` says so if that was not our doing.

        `most_bytes`: of the JSON of an answer.
        """
        self.broken = False
        """Whether nothing arrives any more; its calls hear of it once it has been killed."""
        self.ended: EndedError | None = None
        self.late: dict[int, float] = {}
        """Calls that nobody waits for, and since when."""
        self._process = process
        self._what, self._ended = what, ended
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Frame] | AnswerStream] = {}
        self._bounds: dict[int, int] = {}  # bytes of parts, of all calls without a last answer
        self._reader = FrameReader(self._bound, most_bytes=most_bytes)
        self._full: AnswerStream | None = None  # nothing is read until it has room
        self._dying: asyncio.Task[None] | None = None
        process.receive(self._receive, self._closed)

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
        number = await self.send(answer, CallRequest(op, fields, parts, most_bytes))
        try:
            return await answer
        finally:
            self.give_up(number)

    def stream(
        self,
        op: str,
        fields: Mapping[str, Any] = _NOTHING,
        parts: Mapping[str, Any] = _NOTHING,
        *,
        most_bytes: int = 0,
    ) -> AnswerStream:
        """The answers of a function that has several; each has parts of at most so many bytes.

        It is a context, whose beginning raises `EndedError` if the process has ended. Once it was
        left, a process that goes on to answer is ended.
        """
        return AnswerStream(self, CallRequest(op, fields, parts, most_bytes))

    async def kill(self, why: str = "it is not needed any more") -> None:
        """End the process, and with it all calls in progress."""
        self._end(EndedError(why))
        if self._dying is not None:
            self._dying.cancel()
        await self._process.kill()

    async def send(self, answer: asyncio.Future[Frame] | AnswerStream, request: CallRequest) -> int:
        """Send a request whose answers go to a future or a stream; returns its number."""
        number = next(self._numbers)
        asked = {ID: number, OP: request.op, **request.fields}
        parts = request.parts
        if parts and sum(map(_num_bytes, parts.values())) > _IN_A_THREAD_BYTES:
            data = await asyncio.to_thread(frame, asked, parts)
        else:
            data = frame(asked, parts)
        if self.ended is not None:
            raise EndedError(self.ended.message, self.ended.how)
        self._waiting[number] = answer
        self._bounds[number] = request.most_bytes
        self._process.write(data)
        return number

    def give_up(self, number: int) -> None:
        """Nobody waits for the answers to a request any more, if there are still any to come."""
        if self._waiting.pop(number, None) is not None:
            self.late[number] = self._clock()

    def go_on(self, stream: AnswerStream) -> None:
        """There is room in a stream."""
        if self._full is stream and not stream.is_full:
            self._full = None
            self._deliver_all()
            if self._full is None:
                self._process.resume()

    def _receive(self, data: bytes) -> None:
        if not self.broken:
            self._reader.feed(data)
            self._deliver_all()

    def _closed(self) -> None:
        self._break(self._ended)

    def _break(self, why: str) -> None:
        if not self.broken:
            self.broken = True
            self._dying = asyncio.create_task(self._die(why), name="calls")

    async def _die(self, why: str) -> None:
        await self._process.kill()
        how = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                how = await self._process.exit_text()
        self._end(EndedError(f"{self._what}{why}" + (f" ({how})" if how else ""), how))

    def _bound(self, fields: dict[str, Any]) -> int:
        """The bytes that parts of an answer may have; a process that sends others is to end."""
        number = fields.get(ID)
        if not isinstance(number, int):
            raise FrameError(f"answered to {str(number)[:80]!r}")
        bound = self._bounds.get(number)
        if bound is None:
            raise FrameError(f"answered to {number}, which nobody has asked")
        return bound

    def _deliver_all(self) -> None:
        try:
            while self._full is None and (answer := self._reader.next()) is not None:
                self._deliver(answer)
        except FrameError as error:
            self._break(error.message)

    def _deliver(self, frame: Frame) -> None:
        """Hand an answer to whoever waits for it."""
        number: int = frame.fields.pop(ID)
        is_last = not frame.fields.pop(MORE, False)
        waiting = self._waiting.get(number)
        if is_last:
            del self._bounds[number]
            self._waiting.pop(number, None)
            self.late.pop(number, None)
        answer = answer_of(frame) if is_last else frame
        if isinstance(waiting, AnswerStream):
            waiting.put(answer, is_last=is_last)
            if waiting.is_full:
                self._full = waiting
                self._process.pause()
        elif not is_last:  # else a process could keep us reading what nobody wants
            raise FrameError(f"answered to {number} more than once")
        elif waiting is not None and not waiting.done():
            if isinstance(answer, CallError):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)

    def _end(self, error: EndedError) -> None:
        self.broken = True
        if self.ended is None:
            self.ended = error
            waiting, self._waiting = self._waiting, {}
            for each in waiting.values():
                if isinstance(each, AnswerStream):
                    each.put(error, is_last=True)
                elif not each.done():
                    each.set_exception(error)


def answer_of(message: Frame) -> Frame | CallError:
    """The error that an answer tells, or the answer itself."""
    if ERROR not in message.fields:
        return message
    kinds = message.fields.get(KINDS)
    names = cast("list[Any]", kinds) if isinstance(kinds, list) else []
    return CallError(str(message.fields[ERROR])[:_MAX_ERROR_CHARS], frozenset(map(str, names)))


def _num_bytes(part: Any) -> int:
    return part.nbytes if hasattr(part, "nbytes") else len(part)
