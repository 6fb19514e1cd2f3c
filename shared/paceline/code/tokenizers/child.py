"""Runs the tokenizer and the chat template of a job in a process of that job.

It is given the files of the model, then calls; see `token_frames`. One is in progress at a time: a
call that does not return is known by its place among those that were not answered.
"""

from __future__ import annotations

import json
import os
import resource
import time
from typing import Any, BinaryIO

from paceline.code.frames import HEAD, requests, take_pipes
from paceline.code.tokenizers.frames import (
    MAX_ERROR_CHARS,
    Answer,
    AnswerFrame,
    ShowCall,
    framed,
    from_json,
)
from paceline.errors import InvalidError
from paceline.sandbox.seal import die_with_parent
from paceline.tokens.chat import TOKENIZER, At, Tokenizer
from paceline.tokens.dialogue import render_step

_FULL_BYTES = 256 << 10
_FULL_S = 0.02  # answers wait for others so long


def main(memory_bytes: int) -> None:
    """Serve requests on standard input; `memory_bytes` of address space, 0 if it is bounded."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Without a sandbox nothing else ends it if the service dies while it computes.
    die_with_parent()
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    source, sink = take_pipes()
    child = _TokenChild(sink)
    child.load(source)
    for request in requests(source):
        child.answer(request)
    os._exit(0)


class _TokenChild:
    """The tokenizer, and where its answers go."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._part = ""  # that works
        self._tokenizer: Tokenizer | None = None

    def load(self, source: BinaryIO) -> None:
        """Read the files, and say which tokens end a turn or what is wrong with the files."""
        sizes: dict[str, int] = json.loads(source.read(HEAD.unpack(source.read(HEAD.size))[0]))
        files = {name: source.read(size) for name, size in sizes.items()}
        try:
            self._tokenizer = Tokenizer.from_files(files, at=self._tell)
            head: dict[str, Any] = {"eos": list(self._tokenizer.eos)}
        except InvalidError as error:
            head = {"error": error.message[:MAX_ERROR_CHARS]}
        except BaseException as error:  # the supervisor boundary of the files' code
            head = {"error": f"model.path: {self._part}: {_named(error)}"}
        self._write(framed(head))

    def answer(self, request: dict[str, Any]) -> None:
        """Answer all calls of a request."""
        at = self._tell if request["tell"] else self._note
        frame, since = AnswerFrame(), time.monotonic()
        for call in request["calls"]:
            frame.add(self._answer(call, at))
            if frame.size > _FULL_BYTES or time.monotonic() - since > _FULL_S:
                self._write(frame.take())
                since = time.monotonic()
        if frame:
            self._write(frame.take())

    def _answer(self, raw: dict[str, Any], at: At) -> Answer:
        assert self._tokenizer is not None
        call = from_json(raw)
        try:
            if isinstance(call, ShowCall):
                return render_step(self._tokenizer, call.step, at=at)
            at(TOKENIZER)
            return self._tokenizer.turn_text(call.tokens, keep_special=call.keep_special)
        except InvalidError as error:
            return error
        except BaseException as error:  # the supervisor boundary of one call
            return InvalidError(f"model.path: {self._part}: {_named(error)}")

    def _note(self, part: str) -> None:
        self._part = part

    def _tell(self, part: str) -> None:
        self._part = part
        self._write(framed({"at": part}))

    def _write(self, data: bytes) -> None:
        self._sink.write(data)
        self._sink.flush()


def _named(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        return f"needs more than the {limit >> 20} MiB of memory that a tokenizer may use"
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
