"""Frames with arrays of numbers after their JSON: raw bytes, which need no parsing.

The message names the arrays: `{"arrays": [[name, dtype, size], ...], ...}`; their bytes follow, in
that order, little endian.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from paceline.code.frames import HEAD, FrameError, frame, read_frame

DTYPES = {"f8": np.dtype("<f8"), "i8": np.dtype("<i8"), "b1": np.dtype("|b1")}
_NAMES = {np.dtype("float64"): "f8", np.dtype("int64"): "i8", np.dtype("bool"): "b1"}
_LISTED = "arrays"
MOST_ARRAYS = 64
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ArrayMessage:
    """A message and its arrays [n] of float64, int64 or bool, which are read-only."""

    fields: dict[str, Any]
    arrays: Arrays


def array_frame(fields: Mapping[str, Any], arrays: Arrays) -> bytes:
    """A message as a frame, with the bytes of its arrays after it.

    Raises:
        KeyError: an array has another dtype than float64, int64 or bool.
    """
    listed = [[name, _NAMES[each.dtype], each.size] for name, each in arrays.items()]
    contents = [each.astype(DTYPES[_NAMES[each.dtype]], copy=False) for each in arrays.values()]
    return frame({**fields, _LISTED: listed}) + b"".join(each.tobytes() for each in contents)


def array_requests(source: BinaryIO) -> Iterator[ArrayMessage]:
    """The messages of a service that is trusted, until it closes the pipe."""
    while (head := source.read(HEAD.size)) and len(head) == HEAD.size:
        fields: dict[str, Any] = json.loads(source.read(HEAD.unpack(head)[0]))
        found = {
            name: _array(source.read(size * DTYPES[kind].itemsize), kind)
            for name, kind, size in fields.pop(_LISTED)
        }
        yield ArrayMessage(fields, found)


async def read_array_frame(reader: asyncio.StreamReader, *, most_bytes: int) -> ArrayMessage:
    """The next message; its arrays have at most so many bytes together.

    Raises:
        FrameError: it is no such message, is too large, or the stream has ended.
    """
    fields = await read_frame(reader)
    listed = _checked(fields.pop(_LISTED, []), most_bytes)
    found: dict[str, NDArray[Any]] = {}
    for name, kind, num_bytes in listed:
        try:
            found[name] = _array(await reader.readexactly(num_bytes), kind)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise FrameError("its process has ended") from None
    return ArrayMessage(fields, found)


def _checked(listed: Any, most_bytes: int) -> list[tuple[str, str, int]]:
    """Names, kinds and bytes of the arrays that a process wants to send."""
    if not isinstance(listed, list) or len(cast("list[Any]", listed)) > MOST_ARRAYS:
        raise FrameError("unreadable answer: no list of arrays")
    found: list[tuple[str, str, int]] = []
    for each in cast("list[Any]", listed):
        match each:
            case [str() as name, str() as kind, int() as size] if kind in DTYPES and size >= 0:
                found.append((name, kind, size * DTYPES[kind].itemsize))
            case _:
                raise FrameError(f"unreadable answer: an array {str(each)[:80]}")
    if (total := sum(num_bytes for _, _, num_bytes in found)) > most_bytes:
        raise FrameError(f"answered with {total} bytes; at most {most_bytes} are allowed")
    return found


def _array(data: bytes, kind: str) -> NDArray[Any]:
    """A copy, so that it is aligned as arrays are that numpy has made."""
    found = np.frombuffer(data, DTYPES[kind]).copy()
    found.flags.writeable = False
    return found
