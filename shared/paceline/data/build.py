"""Reads all rows of a source once, checks them and writes where each is.

An index is a folder: `meta.json`, `index` with a record of `RECORD` for each row, and `rows` if the
rows are not in files that can be read in place.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from paceline.data.errors import RowError, of_os_error
from paceline.data.files import LINES, DataFile, find
from paceline.data.readers import lines_of, opened_lines, parsed, table_rows
from paceline.data.shape import RowShape
from paceline.errors import InvalidError
from paceline.platform.beneath import ReadableFolders
from paceline.platform.digest import digest_of, digest_of_file

_MOST_LISTED = 5  # files in a message
MAX_ROWS = 50_000_000
RECORD = struct.Struct("<IIQQQ")
"""File, length, offset, check and split key of a row."""
META, INDEX, ROWS = "meta.json", "index", "rows"


def check_of(line: bytes) -> int:
    """64 bits of a digest of a row, by which it is known when it is read again."""
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "little")


@dataclass(slots=True)
class _Index:
    """Records that are being written, into a folder that will get another name."""

    folder: Path
    shape: RowShape
    records: BinaryIO
    spool: BinaryIO
    spool_bytes: int
    copied: int  # bytes of files that were copied to be read, and are still there
    num_rows: int = 0
    spooled: int = 0
    files: list[str] = field(default_factory=list[str])

    def add(self, file: int, offset: int, line: bytes) -> None:
        """Check a row and write its record."""
        row = parsed(line)
        key = self.shape.checked(row)
        self.records.write(RECORD.pack(file, len(line), offset, check_of(line), key))
        self.num_rows += 1
        if self.num_rows > MAX_ROWS:
            raise InvalidError(f"more than {MAX_ROWS} rows")

    def spool_row(self, line: bytes) -> int:
        """Write a row that cannot be read in place; returns its offset."""
        start = self.spooled
        self.spooled += len(line)
        if self.spooled + self.copied > self.spool_bytes:
            raise InvalidError(
                f"has more than {self.spool_bytes} bytes of rows, which is the most for files that "
                "are compressed, in columns or elsewhere, with copies of the latter (`data_bytes` "
                "of experience)"
            )
        self.spool.write(line)
        return start


def build(
    path: Path,
    name: str,
    shape: RowShape,
    into: Path,
    *,
    folders: ReadableFolders,
    spool_bytes: int,
) -> None:
    """Write the index of a source below `folders` into a folder.

    `spool_bytes`: of rows that cannot be read in place, and of files that lie below `into`.

    Raises:
        InvalidError: names the file, the row or line, and what is wrong with it.
        MissingDataError: a file is not there or may not be read.
        UnavailableError: a disk is full, or fails.
    """
    began = time.monotonic()
    found = find(path, name, folders)
    digests = list[str]()
    with (into / INDEX).open("wb") as records, (into / ROWS).open("wb") as spool:
        copies = [each for each in found if each.path.resolve().is_relative_to(into.resolve())]
        copied = sum(each.path.stat().st_size for each in copies)
        index = _Index(into.resolve(), shape, records, spool, spool_bytes, copied)
        for file in found:
            digests.append(_add_file(index, file, is_one_of=len(copies)))
    if not index.num_rows:
        listed = ", ".join(file.name for file in found[:_MOST_LISTED])
        raise InvalidError(f"{listed or name}: has no rows; one JSON object a line is needed")
    named = [[file.name, digest] for file, digest in zip(found, digests, strict=True)]
    meta = {
        "num_rows": index.num_rows,
        "digest": digests[0] if len(found) == 1 else digest_of(json.dumps(named).encode()),
        "files": index.files,
        "seconds": round(time.monotonic() - began, 3),
    }
    (into / META).write_text(json.dumps(meta))


def _add_file(index: _Index, file: DataFile, *, is_one_of: int) -> str:
    """Add the rows of a file, which may be one of several copies; returns its digest.

    Copies are deleted when their rows are spooled, but for a single one that is read in place:
    many of them would all have to be held open.
    """
    try:
        if file.format == LINES and not file.compressed and is_one_of <= 1:
            return _add_in_place(index, file)
        with file.open() as opened:
            digest = digest_of_file(opened)
        number = _place_of_spool(index)
        for where, line in _spooled_rows(file, index.shape):
            _added(index, file, where, number, index.spool_row(line), line)
        if is_one_of:
            index.copied -= file.path.stat().st_size
            file.path.unlink()
        return digest
    except OSError as error:
        raise of_os_error(file.name, error) from None


def _add_in_place(index: _Index, file: DataFile) -> str:
    number = len(index.files)
    path = file.path.resolve()
    is_copy = path.is_relative_to(index.folder)
    index.files.append(str(path.relative_to(index.folder) if is_copy else path))
    with file.open() as opened:
        for line, offset, data in lines_of(opened, file.name):
            _added(index, file, f"line {line}", number, offset, data)
        return digest_of_file(opened)


def _place_of_spool(index: _Index) -> int:
    if ROWS not in index.files:
        index.files.append(ROWS)
    return index.files.index(ROWS)


def _spooled_rows(file: DataFile, shape: RowShape) -> Iterator[tuple[str, bytes]]:
    """Rows of a file that cannot be read in place, and where they are in it."""
    if file.format == LINES:
        with opened_lines(file) as opened:
            for line, _, data in lines_of(opened, file.name):
                yield f"line {line}", data
        return
    for row, data in table_rows(file, shape.top_columns()):
        yield f"row {row}", data


def _added(
    index: _Index, file: DataFile, where: str, number: int, offset: int, line: bytes
) -> None:
    try:
        index.add(number, offset, line)
    except RowError as error:
        raise InvalidError(f"{file.name}: {where}: {error.message}") from None
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, for one
        if isinstance(error, InvalidError):
            raise InvalidError(f"{file.name}: {error.message}") from None
        raise InvalidError(f"{file.name}: {where}: {error}") from None


def meta_of(folder: Path) -> dict[str, Any]:
    """What is known of an index."""
    return json.loads((folder / META).read_text())
