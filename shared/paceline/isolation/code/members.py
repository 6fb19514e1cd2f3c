"""The files of a zip archive that somebody else has made."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from pathlib import PurePosixPath
from typing import IO

from paceline.errors import InvalidError

MOST_PATH, DEEPEST = 1024, 32  # bytes of a path, and its parts
_MOST_NAME = 255  # bytes of a file or folder
SMALLEST_BYTES = 4096  # that a file or folder takes of a disk, be it empty
_SHOWN = 200
# The end of an archive and a comment.
_END, _END_MARK, _ZIP64_MARK = struct.Struct("<4s4H2LH"), b"PK\5\6", b"PK\6\7"
_TAIL_BYTES = _END.size + (1 << 16)
BROKEN = (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, RuntimeError, EOFError)


def opened(
    archive: IO[bytes], what: str, *, most_files: int, most_listed_bytes: int
) -> zipfile.ZipFile:
    """An archive whose list of files has at most so many bytes; `zipfile` reads it whole.

    `what` begins each error, which says that `most_files` are allowed.

    Raises:
        InvalidError: its list is longer, or of the kind for more than 65,535 files.
        zipfile.BadZipFile: it is none.
    """
    size = archive.seek(0, os.SEEK_END)
    start = archive.seek(max(0, size - _TAIL_BYTES))
    tail = archive.read(_TAIL_BYTES)
    is_last = tail[-_END.size :].startswith(_END_MARK) and tail.endswith(b"\0\0")
    at = len(tail) - _END.size if is_last else tail.rfind(_END_MARK)
    if at < 0 or len(tail) - at < _END.size:
        raise zipfile.BadZipFile("it has no end")
    listed_bytes = _END.unpack_from(tail, at)[5]
    archive.seek(max(0, start + at - 20))
    if listed_bytes > most_listed_bytes or archive.read(4) == _ZIP64_MARK:
        raise InvalidError(f"{what}: too many files; at most {most_files} are allowed")
    archive.seek(0)
    return zipfile.ZipFile(archive)


def plain_members(
    archive: zipfile.ZipFile, what: str, *, most_files: int, most_bytes: int
) -> list[zipfile.ZipInfo]:
    """The files of an archive, all of which are plain, lie inside and are there once.

    `what` begins each error; `most_bytes` of all of them unpacked, as the archive lists them.

    Raises:
        InvalidError: some are not, or there are too many, or none.
    """
    infos = [info for info in archive.infolist() if not info.is_dir()]
    if not 0 < len(infos) <= most_files:
        raise InvalidError(f"{what}: {len(infos)} files; from 1 to {most_files} are allowed")
    if (total := sum(info.file_size for info in infos)) > most_bytes:
        raise InvalidError(f"{what}: {too_large(total, most_bytes)}")
    seen = set[str]()
    for info in infos:
        _check_path(info, what)
        if info.filename in seen:
            raise InvalidError(f"{what}: {info.filename[:_SHOWN]!r} is there twice")
        seen.add(info.filename)
    for name in seen:
        for parent in PurePosixPath(name).parents:
            if parent.as_posix() in seen:
                raise InvalidError(f"{what}: {str(parent)[:_SHOWN]!r} is a file and a folder")
    return infos


def too_large(size: int, most: int) -> str:
    """That something has too many bytes."""
    return f"{size} bytes; at most {most} are allowed, and large files belong on the volume"


def _check_path(info: zipfile.ZipInfo, what: str) -> None:
    if len(info.filename.encode()) > MOST_PATH or info.filename.count("/") >= DEEPEST:
        raise InvalidError(
            f"{what}: {info.filename[:_SHOWN]!r}... is too long; at most {MOST_PATH} bytes and "
            f"{DEEPEST} parts are allowed"
        )
    path = PurePosixPath(info.filename)
    kind = stat.S_IFMT(info.external_attr >> 16)
    inside = not path.is_absolute() and ".." not in path.parts and path.as_posix() != "."
    plain = kind in (0, stat.S_IFREG) and not info.flag_bits & 1
    plain = plain and info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    plain = plain and all(len(part.encode()) <= _MOST_NAME for part in path.parts)
    if not (inside and plain and path.as_posix() == info.filename) or "\\" in info.filename:
        raise InvalidError(f"{what}: {info.filename[:_SHOWN]!r} is not a plain file inside")
