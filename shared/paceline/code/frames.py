"""JSON frames between a service and a process with code that nobody trusts."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

from pydantic_core import from_json

from paceline.isolation.frames import FrameError
from paceline.plugins import Message, Observation

HEAD = struct.Struct(">I")  # bytes that follow
MAX_FRAME_BYTES = 1 << 20  # parsing more would hold up a service's loop


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Reserve stdin and stdout for frames, so that code that prints or reads does not use them."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return source, sink


def frame(message: object) -> bytes:
    """A message as JSON, after its length."""
    # Half a surrogate pair, of a file's name for example, becomes `?`: UTF-8 has none.
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    return HEAD.pack(len(body)) + body


def message_fields(message: Message) -> list[Any]:
    """A message of a dialogue as JSON: its texts in their order, and its calls of tools."""
    calls = [dict(call) for call in message.tool_calls]
    return [message.role, message.content, message.name, message.tool_call_id, calls]


def requests(source: BinaryIO) -> Iterator[dict[str, Any]]:
    """The messages of a service that is trusted, until it closes the pipe."""
    while (head := source.read(HEAD.size)) and len(head) == HEAD.size:
        yield json.loads(source.read(HEAD.unpack(head)[0]))


def parsed(body: bytes) -> Any:
    """JSON that nobody trusts, of which every text can be encoded as UTF-8.

    Raises:
        FrameError: it is no JSON, is nested too deeply, or has half a surrogate pair.
    """
    try:
        return from_json(body)
    except ValueError as error:
        raise FrameError(f"unreadable answer: {error}") from None


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message.

    Raises:
        FrameError: it is no JSON object, is too large, or the stream has ended.
    """
    try:
        (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
        if size > MAX_FRAME_BYTES:
            raise FrameError(f"answered with {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
        body = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise FrameError("its process has ended") from None
    found = parsed(body)
    if not isinstance(found, dict):
        raise FrameError("unreadable answer: not an object")
    return cast("dict[str, Any]", found)


def observation_fields(value: Observation) -> dict[str, Any]:
    """An observation as JSON."""
    return {
        "messages": [message_fields(message) for message in value.messages],
        "text": value.text,
        "tools": [dict(tool) for tool in value.tools],
    }


def observation_of(raw: Mapping[str, Any]) -> Observation:
    """An observation of `observation_fields`; raises TypeError, ValueError or KeyError."""
    tools = tuple(dict(tool) for tool in raw["tools"])
    return Observation(messages=messages_of(raw["messages"]), text=str(raw["text"]), tools=tools)


def messages_of(raw: Any) -> tuple[Message, ...]:
    """Messages of `message_fields`; raises TypeError or ValueError."""
    return tuple(
        Message(*map(str, fields), tool_calls=tuple(dict(call) for call in calls))
        for *fields, calls in raw
    )
