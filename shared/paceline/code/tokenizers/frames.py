"""What a service and a process with a job's tokenizer say to each other.

A request is a frame of JSON with calls. They are answered in their order, by frames of some answers
each: JSON with what they are and their sizes, then their tokens (int32) and texts (UTF-8), which
cost little to read even if there are many. A request may ask for `told` frames too, which say which
part of the tokenizer works next.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from paceline.code.frames import HEAD, MAX_FRAME_BYTES, FrameError, message_fields, parsed
from paceline.enums import TokenSource
from paceline.errors import InvalidError, LimitError
from paceline.plugins import Message
from paceline.tokens.chat import TEMPLATE, TOKENIZER, RejectedMessagesError, Rendered
from paceline.tokens.steps import DialogueStep, RenderedPrefix
from paceline.types import TokenSpan

MAX_ANSWER_BYTES = 32 << 20
MAX_ERROR_CHARS = 1000
MAX_EOS = 1000
_SOURCES = (TokenSource.ENVIRONMENT, TokenSource.TOOL, TokenSource.TEMPLATE)
# Of an error; any other is an `InvalidError`.
_KINDS: Mapping[str, type[InvalidError]] = {
    "limit": LimitError,
    "rejected": RejectedMessagesError,
}
_NUMBER_OF = {source: number for number, source in enumerate(_SOURCES)}

Shown = tuple[Rendered, RenderedPrefix]
Answer = Shown | str | InvalidError


@dataclass(frozen=True, slots=True)
class TextCall:
    """The text of tokens, as `Tokenizer.turn_text` has it."""

    tokens: Sequence[int]
    keep_special: bool

    @property
    def size(self) -> int:
        """Roughly, in bytes."""
        return 4 * len(self.tokens)


@dataclass(frozen=True, slots=True)
class ShowCall:
    """The tokens of an observation, as `render_step` has them."""

    step: DialogueStep

    @property
    def size(self) -> int:
        """Roughly, in bytes."""
        return len(self.step.text) + sum(map(_chars, self.step.messages))


def _chars(message: Message) -> int:
    return len(message.content) + sum(len(str(call)) for call in message.tool_calls)


Call = TextCall | ShowCall


@dataclass(frozen=True, slots=True)
class Told:
    """The part of the tokenizer that works next."""

    part: str


def to_json(call: Call) -> dict[str, Any]:
    """A call as JSON."""
    if isinstance(call, TextCall):
        return {"tokens": list(call.tokens), "special": call.keep_special}
    step = call.step
    return {
        "messages": [message_fields(message) for message in step.messages],
        "num_new": step.num_new,
        "text": step.text,
        "tools": [dict(tool) for tool in step.tools],
        "offers_tools": step.offers_tools,
        "num_turns": step.num_turns,
        "turn_tail": step.turn_tail,
        "prefix": [step.prefix.length, step.prefix.crc],
        "now": step.now.isoformat(),
        "max_bytes": step.max_bytes,
    }


def from_json(call: Mapping[str, Any]) -> Call:
    """A call from JSON of a service, which is trusted."""
    if "tokens" in call:
        return TextCall(call["tokens"], call["special"])
    given: dict[str, Any] = {
        **call,
        "messages": tuple(
            Message(*texts, tool_calls=tuple(calls)) for *texts, calls in call["messages"]
        ),
        "tools": tuple(call["tools"]),
        "turn_tail": tuple(call["turn_tail"]),
        "prefix": RenderedPrefix(*call["prefix"]),
        "now": datetime.fromisoformat(call["now"]),
    }
    return ShowCall(DialogueStep(**given))


class AnswerFrame:
    """Answers on their way to a service."""

    def __init__(self) -> None:
        self.size = 0
        self._items: list[Mapping[str, Any]] = []
        self._bodies: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, answer: Answer) -> None:
        """One more answer; one that is far too long becomes an error."""
        item, body = _item(answer)
        if len(body) > MAX_ANSWER_BYTES // 2:
            item, body = _item(LimitError(f"model.path: {len(body)} bytes are too much to show"))
        self._items.append(item)
        self._bodies.append(body)
        self.size += len(body) + 100 + 20 * len(item.get("spans", ()))

    def take(self) -> bytes:
        """The frame with all answers since the last one."""
        data = framed({"answers": self._items}, self._bodies)
        self._items, self._bodies, self.size = [], [], 0
        return data


def framed(head: Mapping[str, Any], bodies: Iterable[bytes] = ()) -> bytes:
    """A frame of JSON and bytes after it."""
    text = json.dumps(head).encode()
    body = b"".join((HEAD.pack(len(text)), text, *bodies))
    return HEAD.pack(len(body)) + body


def _item(answer: Answer) -> tuple[Mapping[str, Any], bytes]:
    if isinstance(answer, str):
        body = answer.encode(errors="replace")
        return {"text": len(body)}, body
    if isinstance(answer, InvalidError):
        kind = next((name for name, each in _KINDS.items() if isinstance(answer, each)), "")
        return {"error": answer.message[:MAX_ERROR_CHARS], "kind": kind}, b""
    rendered, prefix = answer
    spans = [[span.start, span.end, _NUMBER_OF[span.source]] for span in rendered.spans]
    body = array("i", rendered.tokens).tobytes()
    return {"tokens": len(body), "spans": spans, "prefix": [prefix.length, prefix.crc]}, body


async def read_head(reader: asyncio.StreamReader) -> tuple[dict[str, Any], memoryview]:
    """The next frame: its JSON, and the bytes after it.

    Raises:
        FrameError: it is none, is too large, or the stream has ended.
    """
    try:
        (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
        if size > MAX_ANSWER_BYTES:
            raise FrameError(f"answered with {size} bytes; at most {MAX_ANSWER_BYTES} are allowed")
        data = memoryview(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise FrameError("its process has ended") from None
    length = HEAD.unpack(data[: HEAD.size])[0] if size >= HEAD.size else size + 1
    if not length <= min(size - HEAD.size, MAX_FRAME_BYTES):
        raise FrameError("unreadable answer: its head is longer than it is, or than is allowed")
    head = parsed(bytes(data[HEAD.size : HEAD.size + length]))
    if not isinstance(head, dict):
        raise FrameError("unreadable answer: not an object")
    return cast("dict[str, Any]", head), data[HEAD.size + length :]


def told(head: Mapping[str, Any]) -> str:
    """The part of the tokenizer that works next; raises `FrameError` for another word."""
    part = head.get("at")
    if part not in (TEMPLATE, TOKENIZER):
        raise FrameError("unreadable answer: no such part")
    return part


async def read_answers(reader: asyncio.StreamReader) -> list[Answer] | Told:
    """The next answers, or which part works next; raises as `read_head`."""
    head, rest = await read_head(reader)
    if "at" in head:
        return Told(told(head))
    found: list[Answer] = []
    try:
        for item in head["answers"]:
            size = item.get("text", item.get("tokens", 0))
            if type(size) is not int or not 0 <= size <= len(rest):
                raise FrameError("unreadable answer: it is shorter than it says")
            found.append(_answer(item, rest[:size]))
            rest = rest[size:]
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise FrameError(f"unreadable answer: {type(error).__name__}: {error}") from None
    return found


def _answer(item: Mapping[str, Any], body: memoryview) -> Answer:
    if "error" in item:
        kind = _KINDS.get(item["kind"], InvalidError)
        return kind(str(item["error"])[:MAX_ERROR_CHARS])
    if "text" in item:
        return bytes(body).decode()
    tokens = array("i")
    tokens.frombytes(body)
    if tokens and min(tokens) < 0:
        raise ValueError("a token is negative")
    at, spans = 0, list[TokenSpan]()
    for start, end, source in item["spans"]:
        if start != at or type(end) is not int or end < start:
            raise ValueError("spans have gaps")
        spans.append(TokenSpan(start, end, _SOURCES[_natural(source)]))
        at = end
    if at != len(tokens):
        raise ValueError("spans have another length")
    length, crc = map(_natural, item["prefix"])
    return Rendered(tuple(tokens), tuple(spans)), RenderedPrefix(length, crc)


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a number is none, or negative")
    return value


def read_eos(head: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a turn, as a process tells them once it has read its files.

    Raises:
        InvalidError: the files cannot be read, in its words.
        FrameError: these are no tokens.
    """
    if "error" in head:
        raise InvalidError(str(head["error"])[:MAX_ERROR_CHARS])
    try:
        found = tuple(map(_natural, head["eos"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError(f"unreadable answer: eos: {error}") from None
    if len(found) > MAX_EOS or any(token >= 2**31 for token in found):
        raise FrameError("unreadable answer: eos: too many, or too large")
    return found
