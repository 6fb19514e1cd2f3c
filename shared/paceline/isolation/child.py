"""The child's side: answers the calls of its parent, on its standard input, with functions.

Like `frames`, it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from paceline.errors import PacelineError
from paceline.isolation.frames import (
    MAX_ERROR_CHARS,
    MAX_JSON_BYTES,
    Frame,
    frame,
    json_bytes,
    messages,
)

TYPE_CHECKING = False  # see `frames`
if TYPE_CHECKING:
    from typing import Any, BinaryIO

ID, OP, MORE, ERROR, KINDS = "$id", "op", "$more", "$error", "$kinds"
"""Fields of a frame that are the kit's own; `op` names a function."""
_NO_PARTS: Mapping[str, Any] = {}


class TooLargeError(PacelineError):
    """The fields of an answer have more bytes than the parent takes."""


class ServedCall:
    """One call of the parent: its fields and parts, and a way to answer more than once."""

    __slots__ = ("_send", "fields", "number", "parts")

    def __init__(self, message: Frame, send: Callable[[Mapping[str, Any], Any], None]) -> None:
        self.fields = message.fields
        self.parts = message.parts
        self.number: int = message.fields[ID]
        self._send = send

    def tell(self, fields: Mapping[str, Any], parts: Mapping[str, Any] = _NO_PARTS) -> None:
        """Send an answer before the last one, which the function returns."""
        self._send({ID: self.number, MORE: True, **fields}, parts)


Function = Callable[[ServedCall], "Frame | Mapping[str, Any] | None"]


def told(error: BaseException) -> str:
    """The text of an error: its class, its words, and where in the job's own files it was raised.

    Errors of Paceline are told in their own words.
    """
    if isinstance(error, PacelineError):
        return error.message
    return raised(error)


def raised(error: BaseException) -> str:
    """The text of an error of the job's own code; as `told`, and always with its class."""
    if isinstance(error, TooLargeError):
        return error.message
    where = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if os.path.dirname(name) == sys.path[0]:  # the job's own files
            where = f" ({os.path.basename(name)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] + where


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Reserve stdin and stdout for frames, so that code that prints or reads does not use them."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return source, sink


def serve(
    functions: Mapping[str, Function],
    *,
    threads: int = 0,
    words: Callable[[BaseException], str] = told,
    most_bytes: int = MAX_JSON_BYTES,
) -> None:
    """Answer calls by the function of their `op` until the parent closes the pipe.

    Whatever a function raises is an answer too, in these `words`. With `threads` as many calls run
    at a time, and the process ends with the pipe, without waiting for those that may never return.
    `most_bytes`: of the JSON of an answer, as the parent takes it.
    """
    source, sink = take_pipes()
    answers = _Answers(functions, sink, words, most_bytes)
    if not threads:
        for message in messages(source):
            answers.answer(message)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        for message in messages(source):
            pool.submit(answers.answer, message)
        os._exit(0)


class _Answers:
    """Calls functions, and sends what they return; from several threads."""

    def __init__(
        self,
        functions: Mapping[str, Function],
        sink: BinaryIO,
        words: Callable[[BaseException], str],
        most_bytes: int,
    ) -> None:
        from _thread import allocate_lock

        self._functions = functions
        self._sink = sink
        self._words = words
        self._most_bytes = most_bytes
        self._writing = allocate_lock()

    def answer(self, message: Frame) -> None:
        call = ServedCall(message, self._send)
        try:
            value = self._functions[call.fields[OP]](call)
            fields, parts = _split(value)
            self._send({ID: call.number, **fields}, parts)
        except BaseException as error:  # the supervisor boundary of one call: it has an answer
            self._fail(call.number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        names = [each.__name__ for each in type(error).__mro__ if issubclass(each, PacelineError)]
        self._send({ID: number, ERROR: self._words(error), KINDS: names}, _NO_PARTS)

    def _send(self, fields: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        data = frame(fields, parts)
        if (size := json_bytes(data)) > self._most_bytes:
            raise TooLargeError(
                f"returned too much besides its arrays: {size} bytes; at most {self._most_bytes} "
                "are allowed"
            )
        with self._writing:
            self._sink.write(data)
            self._sink.flush()


def _split(value: Frame | Mapping[str, Any] | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if value is None:
        return {}, _NO_PARTS
    if isinstance(value, Frame):
        return value.fields, value.parts
    return value, _NO_PARTS
