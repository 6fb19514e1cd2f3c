"""What a service and a process with a job's tokenizer say to each other.

A request has calls. They are answered in their order, by frames of some answers each: what they are
and their sizes as JSON, their tokens (int32) and texts (UTF-8) as one part, which cost little to
read even if there are many. A request may ask for `told` frames too, which say which part of the
tokenizer works next.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from paceline.enums import TokenSource
from paceline.errors import InvalidError, LimitError
from paceline.isolation.code.dialogue import message_fields
from paceline.isolation.frames import Frame, FrameError
from paceline.plugins import Message
from paceline.tokens.chat import TEMPLATE, TOKENIZER, RejectedMessagesError, Rendered
from paceline.tokens.steps import DialogueStep, RenderedPrefix
from paceline.types import TokenSpan

MAX_ANSWER_BYTES = 32 << 20
MAX_ERROR_CHARS = 1000
MAX_EOS = 1000
_BODIES = "bodies"
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

    def take(self) -> Frame:
        """The frame with all answers since the last one."""
        taken = Frame({"answers": self._items}, {_BODIES: b"".join(self._bodies)})
        self._items, self._bodies, self.size = [], [], 0
        return taken


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


def told(head: Mapping[str, Any]) -> str:
    """The part of the tokenizer that works next; raises `FrameError` for another word."""
    part = head.get("at")
    if part not in (TEMPLATE, TOKENIZER):
        raise FrameError("unreadable answer: no such part")
    return part


def answers_of(frame: Frame) -> list[Answer] | Told:
    """The answers in a frame, or which part works next.

    Raises:
        FrameError: it has neither.
    """
    if "at" in frame.fields:
        return Told(told(frame.fields))
    answers: list[Answer] = []
    try:
        rest = memoryview(frame.parts.get(_BODIES, b"")).cast("B")
        for item in frame.fields["answers"]:
            size = item.get("text", item.get("tokens", 0))
            if type(size) is not int or not 0 <= size <= len(rest):
                raise FrameError("unreadable answer: it is shorter than it says")
            answers.append(_answer(item, rest[:size]))
            rest = rest[size:]
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise FrameError(f"unreadable answer: {type(error).__name__}: {error}") from None
    return answers


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
        FrameError: these are no tokens.
    """
    try:
        found = tuple(map(_natural, head["eos"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError(f"unreadable answer: eos: {error}") from None
    if len(found) > MAX_EOS or any(token >= 2**31 for token in found):
        raise FrameError("unreadable answer: eos: too many, or too large")
    return found
