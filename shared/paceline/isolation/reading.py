"""Reads the answers of a process that nobody trusts."""

from __future__ import annotations

from collections.abc import Callable
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


class FrameReader:
    """Takes frames out of what arrives; a frame that is too large is refused by its head."""

    def __init__(self, bound: Callable[[dict[str, Any]], int], *, most_bytes: int) -> None:
        """`most_bytes`: of its JSON; `bound` says how many its parts may have, by its fields.

        `bound` may raise `FrameError`.
        """
        self._bound = bound
        self._most_bytes = most_bytes
        self._unread = bytearray()
        self._fields: dict[str, Any] | None = None  # of a frame whose parts have not arrived
        self._listed: list[tuple[str, str, int]] = []

    def feed(self, data: bytes) -> None:
        """Take what has arrived."""
        self._unread += data

    def next(self) -> Frame | None:
        """The next frame, if all of it is here.

        Raises:
            FrameError: it is no JSON object, or is too large.
        """
        fields = self._fields or self._take_fields()
        if fields is None or not self._listed:
            return None if fields is None else Frame(fields)
        if len(self._unread) < sum(num_bytes for _, _, num_bytes in self._listed):
            self._fields = fields
            return None
        parts: dict[str, Any] = {}
        for name, kind, num_bytes in self._listed:
            parts[name] = part(self._take(num_bytes), kind)
        self._fields, self._listed = None, []
        return Frame(fields, parts)

    def _take_fields(self) -> dict[str, Any] | None:
        if len(self._unread) < HEAD.size:
            return None
        (size,) = HEAD.unpack_from(self._unread)
        if size > self._most_bytes:
            raise FrameError(f"answered with {size} bytes; at most {self._most_bytes} are allowed")
        if len(self._unread) < HEAD.size + size:
            return None
        fields = parsed(self._take(HEAD.size + size)[HEAD.size :])
        bound = self._bound(fields)
        if PARTS in fields:
            self._listed = listed_parts(fields, bound)
        return fields

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(self._unread[:num_bytes])
        del self._unread[:num_bytes]
        return taken


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
