"""JSON frames between a service and a process with code that nobody trusts."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, cast

from paceline.errors import PacelineError

HEAD = struct.Struct(">I")  # bytes that follow
MAX_FRAME_BYTES = 1 << 20  # parsing more would hold up a service's loop


class FrameError(PacelineError):
    """What arrived is no frame, or nothing arrives any more."""


def frame(message: object) -> bytes:
    """A message as JSON, after its length."""
    body = json.dumps(message).encode()
    return HEAD.pack(len(body)) + body


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
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"unreadable answer: {error}") from None
    if not isinstance(found, dict):
        raise FrameError("unreadable answer: not an object")
    return cast("dict[str, Any]", found)
