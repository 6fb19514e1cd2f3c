"""Frames between a service and its child processes: JSON, and the raw bytes of its parts.

A frame is the length of its JSON (4 bytes, big endian) and the JSON, an object. Its field `$parts`
lists what follows, in that order: `[name, kind, size]`, where `size` counts elements of the kind,
little endian; `raw` is bytes.

Children import this before the packages of their job, and some have no packages at all: nothing
but the standard library is imported, and numpy only for arrays.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping

from paceline.errors import PacelineError

TYPE_CHECKING = False  # the module `typing` takes as long to import as all of this
if TYPE_CHECKING:
    from typing import Any, BinaryIO

HEAD = struct.Struct(">I")  # bytes of JSON that follow
MAX_JSON_BYTES = 1 << 20  # parsing more would hold up a service's loop
MAX_ERROR_CHARS = 1000
MAX_PARTS = 64
PARTS = "$parts"
RAW = "raw"
SIZES = {RAW: 1, "f8": 8, "i8": 8, "b1": 1}
"""Bytes of an element, by kind."""
_TYPES = {"f8": "<f8", "i8": "<i8", "b1": "|b1"}
_KINDS = {"float64": "f8", "int64": "i8", "bool": "b1"}
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make one each time
_NO_PARTS: Mapping[str, Any] = {}


class FrameError(PacelineError):
    """Bytes that are no frame, or the end of the stream."""


class Frame:
    """The fields of a frame, and its parts: bytes, or read-only arrays [size] by their kind."""

    __slots__ = ("fields", "parts")

    def __init__(self, fields: dict[str, Any], parts: Mapping[str, Any] = _NO_PARTS) -> None:
        self.fields = fields
        self.parts = parts


def frame(fields: Mapping[str, Any], parts: Mapping[str, Any] = _NO_PARTS) -> bytes:
    """A message as bytes; parts are bytes or arrays of float64, int64 or bool.

    Raises:
        KeyError: an array has another type.
    """
    if not parts:
        return _with_head(fields)
    listed: list[tuple[str, str, int]] = []
    contents: list[Any] = []
    for name, value in parts.items():
        kind = _KINDS[value.dtype.name] if hasattr(value, "dtype") else RAW
        is_raw = kind == RAW
        listed.append((name, kind, len(value) if is_raw else value.size))
        contents.append(value if is_raw else value.astype(_TYPES[kind], copy=False).tobytes())
    return b"".join((_with_head({**fields, PARTS: listed}), *contents))


def _with_head(fields: Mapping[str, Any]) -> bytes:
    # Half a surrogate pair, of a file's name for example, becomes `?`: UTF-8 has none.
    body = _ENCODE(fields).encode("utf-8", "replace")
    return HEAD.pack(len(body)) + body


def json_bytes(data: bytes) -> int:
    """The bytes of JSON in a frame."""
    return HEAD.unpack_from(data)[0]


def messages(source: BinaryIO) -> Iterator[Frame]:
    """The messages of a peer that is trusted, until it closes the pipe."""
    while len(head := source.read(HEAD.size)) == HEAD.size:
        fields: dict[str, Any] = json.loads(source.read(HEAD.unpack(head)[0]))
        if PARTS not in fields:
            yield Frame(fields)
            continue
        listed = fields.pop(PARTS)
        yield Frame(
            fields,
            {name: part(source.read(size * SIZES[kind]), kind) for name, kind, size in listed},
        )


def part(data: bytes, kind: str) -> Any:
    """Bytes, or an array of them; a copy, so that it is aligned as arrays are that numpy makes."""
    if kind == RAW:
        return data
    import numpy as np

    array = np.frombuffer(data, _TYPES[kind]).copy()
    array.flags.writeable = False
    return array
