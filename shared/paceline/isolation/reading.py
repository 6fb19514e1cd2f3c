"""Reads the answers of a process that nobody trusts."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pydantic_core import from_json

from paceline.isolation.frames import HEAD, MAX_PARTS, PARTS, SIZES, Frame, FrameError, part

_ENDED = "its process has ended"


def parsed(body: bytes) -> dict[str, Any]:
    """A JSON object that nobody trusts, of which every text can be encoded as UTF-8.

    Raises:
        FrameError: it is none, is nested too deeply, or has half a surrogate pair.
    """
    try:
        value = from_json(body)
    except ValueError as error:
        raise FrameError(f"unreadable answer: {error}") from None
    if not isinstance(value, dict):
        raise FrameError("unreadable answer: not an object")
    return cast("dict[str, Any]", value)


async def read_fields(reader: asyncio.StreamReader, *, most_bytes: int) -> dict[str, Any]:
    """The JSON of the next frame; `read_parts` reads what follows it.

    Raises:
        FrameError: it is no JSON object, is too large, or the stream has ended.
    """
    try:
        (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
        if size > most_bytes:
            raise FrameError(f"answered with {size} bytes; at most {most_bytes} are allowed")
        body = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise FrameError(_ENDED) from None
    return parsed(body)


async def read_parts(
    reader: asyncio.StreamReader, fields: dict[str, Any], *, most_bytes: int
) -> dict[str, Any]:
    """Parts that the fields of a frame list, of at most so many bytes together.

    Raises:
        FrameError: the list is none, they are too large, or the stream has ended.
    """
    parts: dict[str, Any] = {}
    try:
        for name, kind, num_bytes in listed_parts(fields, most_bytes):
            parts[name] = part(await reader.readexactly(num_bytes), kind)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise FrameError(_ENDED) from None
    return parts


def listed_parts(fields: dict[str, Any], most_bytes: int) -> list[tuple[str, str, int]]:
    """Names, kinds and bytes of the parts that a process wants to send; takes them from `fields`.

    Raises:
        FrameError: they are not listed as they should be, or have more than `most_bytes`.
    """
    raw = fields.pop(PARTS, None)
    if raw is None:
        return []
    if not isinstance(raw, list) or len(cast("list[Any]", raw)) > MAX_PARTS:
        raise FrameError("unreadable answer: no list of parts")
    listed: list[tuple[str, str, int]] = []
    for entry in cast("list[Any]", raw):
        match entry:
            case [str() as name, str() as kind, int() as size] if kind in SIZES and size >= 0:
                listed.append((name, kind, size * SIZES[kind]))
            case _:
                raise FrameError(f"unreadable answer: a part {str(entry)[:80]}")
    if (total := sum(num_bytes for _, _, num_bytes in listed)) > most_bytes:
        raise FrameError(f"answered with {total} bytes; at most {most_bytes} are allowed")
    return listed


def message_of(data: bytes) -> Frame:
    """All that a process has answered, as one frame without parts.

    Raises:
        FrameError: it is something else.
    """
    if len(data) < HEAD.size:
        raise FrameError(_ENDED)
    if HEAD.unpack_from(data)[0] != len(data) - HEAD.size:
        raise FrameError("unreadable answer: it is shorter or longer than it says")
    return Frame(parsed(data[HEAD.size :]))
