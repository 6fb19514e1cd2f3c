"""Frames of Zstandard (RFC 8878, section 3.1): whether a file has all of its last one."""

from __future__ import annotations

from typing import BinaryIO

_SKIPPABLE, _RLE = 0x184D2A50, 1
_MOST_HEADER_BYTES = 18


def is_whole(file: BinaryIO) -> bool:
    """Whether a file ends where a frame does; the library takes one that is cut off for the end.

    Reads the headers of frames and blocks, and goes back to the start.

    Raises:
        zstandard.ZstdError: something that is no frame comes after one.
    """
    size = file.seek(0, 2)
    at = 0
    while at < size:
        at = _end_of_frame(file, at, size)
    file.seek(0)
    return at == size


def _end_of_frame(file: BinaryIO, at: int, size: int) -> int:
    """Where the frame at an offset ends; more than `size` if it is cut off."""
    import zstandard

    file.seek(at)
    head = file.read(_MOST_HEADER_BYTES)
    if int.from_bytes(head[:4], "little") & ~0xF == _SKIPPABLE:
        return at + 8 + int.from_bytes(head[4:8], "little")
    has_checksum = zstandard.get_frame_parameters(head).has_checksum
    at += zstandard.frame_header_size(head)
    is_last = False
    while not is_last and at <= size:
        file.seek(at)
        block = int.from_bytes(file.read(3), "little")
        is_last, kind, length = bool(block & 1), block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == _RLE else length)
    return at + 4 * has_checksum
