"""Runs the tokenizer and the chat template of a job in a process of that job.

It is given the files of the model, then requests; see `frames`. One is in progress at a time: a
call that does not return is known by its place among those that were not answered.
"""

from __future__ import annotations

import os
import resource
import time
from typing import Any

from paceline.errors import InvalidError
from paceline.isolation.child import ServedCall, serve
from paceline.isolation.code.tokenizers.frames import (
    MAX_ERROR_CHARS,
    Answer,
    AnswerFrame,
    ShowCall,
    from_json,
)
from paceline.isolation.frames import Frame
from paceline.isolation.sandbox.seal import die_with_parent
from paceline.tokens.chat import TOKENIZER, At, Tokenizer
from paceline.tokens.dialogue import render_step

_FULL_BYTES = 256 << 10
_FULL_S = 0.02  # answers wait for others so long


def main(memory_bytes: int) -> None:
    """Serve calls on standard input; `memory_bytes` of address space, 0 if it is bounded."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Without a sandbox nothing else ends it if the service dies while it computes.
    die_with_parent()
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    child = _TokenChild()
    serve({"load": child.load, "answer": child.answer})
    os._exit(0)


class _TokenChild:
    """The tokenizer, and the call that it works for."""

    def __init__(self) -> None:
        self._call: ServedCall | None = None
        self._part = ""  # that works
        self._tokenizer: Tokenizer | None = None

    def load(self, call: ServedCall) -> dict[str, Any]:
        """Read the files, its parts; returns which tokens end a turn."""
        self._call = call
        try:
            self._tokenizer = Tokenizer.from_files(call.parts, at=self._tell)
            return {"eos": list(self._tokenizer.eos)}
        except InvalidError:
            raise
        except BaseException as error:  # the supervisor boundary of the files' code
            raise InvalidError(f"model.path: {self._part}: {_named(error)}") from None

    def answer(self, call: ServedCall) -> Frame:
        """Answer all calls of a request."""
        self._call = call
        at = self._tell if call.fields["tell"] else self._note
        frame, since = AnswerFrame(), time.monotonic()
        for raw in call.fields["calls"]:
            if frame.size > _FULL_BYTES or (frame and time.monotonic() - since > _FULL_S):
                full = frame.take()
                call.tell(full.fields, full.parts)
                since = time.monotonic()
            frame.add(self._answer(raw, at))
        return frame.take()

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
        assert self._call is not None
        self._call.tell({"at": part})


def _named(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        return f"needs more than the {limit >> 20} MiB of memory that a tokenizer may use"
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
