"""Reads rows of files one by one, in bounded memory; files of users may hold anything."""

from __future__ import annotations

import base64
import codecs
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, BinaryIO, cast

from pydantic_core import from_json

from paceline.data.errors import RowError
from paceline.data.files import PARQUET, DataFile
from paceline.data.frames import is_whole
from paceline.errors import InvalidError
from paceline.errors.extras import installing

MAX_ROW_BYTES = 1 << 20
_BATCH_ROWS = 256
_CONVERT = "UTF-8 is needed (iconv -f latin1 -t utf-8 OLD > NEW, or another of `iconv -l`)"
_BOMS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def parsed(line: bytes) -> Any:
    """The row in a line.

    Raises:
        RowError: it is no JSON in UTF-8.
    """
    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError:
        try:
            line.decode()
        except UnicodeDecodeError as wrong:
            raise RowError(f"is not UTF-8 at byte {wrong.start}; {_CONVERT}") from None
        if line.lstrip().startswith(b"["):
            raise RowError("is a list; one object a line is needed (jq -c '.[]')") from None
        raise RowError(f"is not JSON: {_why(line)}; one object a line is needed") from None


def _why(line: bytes) -> str:
    """What is wrong with the JSON of a line, and at which byte of it."""
    try:
        from_json(line.strip(), allow_inf_nan=False)
    except ValueError as error:
        return re.sub(r" at line 1 column (\d+)$", r" at byte \1", str(error))
    return "it has white space that JSON lacks"


def lines_of(file: BinaryIO, name: str) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line that is not blank; numbers begin at 1.

    Raises:
        InvalidError: a line is longer than `MAX_ROW_BYTES`; no more than that is read of it.
    """
    offset = 0
    for number in range(1, 1 << 62):
        line = file.readline(MAX_ROW_BYTES + 2)
        if not line:
            return
        if len(line) > MAX_ROW_BYTES + 1 or (len(line) > MAX_ROW_BYTES and line[-1:] != b"\n"):
            raise InvalidError(
                f"{name}: line {number}: has more than {MAX_ROW_BYTES} bytes, which is the most "
                "for a row"
            )
        start, offset = offset, offset + len(line)
        if number == 1:
            for mark, encoding in _BOMS.items():
                if line.startswith(mark):
                    raise InvalidError(f"{name}: line 1: is {encoding}; {_CONVERT}")
            if line.startswith(codecs.BOM_UTF8):
                line, start = line[3:], 3
        if not line.isspace():
            yield number, start, line


@contextmanager
def opened_lines(file: DataFile) -> Generator[BinaryIO]:
    """The decompressed bytes of a file of lines.

    Raises:
        InvalidError: what it needs is not installed, or it is damaged.
    """
    with file.open() as raw:
        if not file.compressed:
            yield raw
            return
        opened, damage = _decompressed(raw, file)
        try:
            if file.compressed == ".zst" and not is_whole(raw):
                raise EOFError("it is cut off")
            yield opened
        except (gzip.BadGzipFile, EOFError, zlib.error, *damage) as error:
            raise InvalidError(f"{file.name}: cannot be decompressed: {error}") from None


def _decompressed(raw: BinaryIO, file: DataFile) -> tuple[BinaryIO, tuple[type[Exception], ...]]:
    """A reader, and what it raises besides what Python's own do if the file is damaged."""
    if file.compressed == ".gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw)), ()
    try:
        import zstandard
    except ImportError:
        raise InvalidError(f"{file.name}: zstandard is not installed; {_EXTRA}") from None
    # `zstd -T`, pzstd and files that were appended to have many frames.
    made = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    reader = io.BufferedReader(made.stream_reader(raw, read_across_frames=True), 1 << 20)
    return cast("BinaryIO", reader), (zstandard.ZstdError,)


_EXTRA = installing("data")


def table_rows(file: DataFile, columns: list[str] | None) -> Iterator[tuple[int, bytes]]:
    """Number and JSON of each row of a Parquet or Arrow file; numbers begin at 0.

    Only the given columns, if these have no dots and are there; errors are left to whoever needs
    a column.

    Raises:
        InvalidError: pyarrow is not installed, or the file cannot be read.
    """
    try:
        import pyarrow
    except ImportError:
        raise InvalidError(f"{file.name}: pyarrow is not installed; {_EXTRA}") from None
    number = 0
    try:
        for batch in _batches(file, columns):
            for row in batch.to_pylist():
                yield number, _dumped(row, file.name, number)
                number += 1
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk; those of damage have none
            raise
        text = f"{type(error).__name__}: {str(error)[:300]}"
        raise InvalidError(f"{file.name}: row {number}: cannot be read: {text}") from None


def _batches(file: DataFile, columns: list[str] | None) -> Iterator[Any]:
    if file.format == PARQUET:
        import pyarrow.parquet as parquet

        with file.open() as source, parquet.ParquetFile(source) as opened:
            names = set(opened.schema_arrow.names)
            tops = [each if each in names else each.partition(".")[0] for each in columns or ()]
            wanted = sorted(set(tops)) if columns and names.issuperset(tops) else None
            yield from opened.iter_batches(batch_size=_BATCH_ROWS, columns=wanted)
        return
    import pyarrow as arrow

    with file.open() as raw, arrow.PythonFile(raw, mode="r") as source:
        head = source.read(6)
        source.seek(0)
        if head == b"ARROW1":
            reader = arrow.ipc.open_file(source)
            batches = (reader.get_batch(at) for at in range(reader.num_record_batches))
        else:
            batches = iter(arrow.ipc.open_stream(source))
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(start, _BATCH_ROWS)


def _dumped(row: dict[str, Any], name: str, number: int) -> bytes:
    """A row as JSON; times as ISO 8601, binary as text or else base64, NaN, of pandas, as null."""
    try:
        text = _json(row)
    except (TypeError, ValueError, RecursionError):
        plain = {each: _representable(row[each], each, name, number) for each in row}
        text = _json(plain)
    if len(text) > MAX_ROW_BYTES:
        raise InvalidError(
            f"{name}: row {number}: has {len(text)} bytes as JSON; at most {MAX_ROW_BYTES} are "
            "allowed; name the columns that are needed in `columns`"
        )
    return text


def _json(value: Any) -> bytes:
    return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False).encode()


def _representable(value: Any, column: str, name: str, number: int) -> Any:
    """The value of a column with null for NaN, if JSON has all else of it."""
    try:
        plain = _without_nan(value)
        _json(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidError(
            f"{name}: row {number}: column {column!r} has a value that JSON lacks: {error}; "
            "name the columns that are needed in `columns` to leave it out"
        ) from None
    return plain


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: _without_nan(each) for key, each in items}
    if isinstance(value, list):
        return [_without_nan(each) for each in cast("list[Any]", value)]
    return None if isinstance(value, float) and math.isnan(value) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()  # some programs write texts as binary
        return base64.b64encode(value).decode()
    raise TypeError(f"a {type(value).__name__}")
