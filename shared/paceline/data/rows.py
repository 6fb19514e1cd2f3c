"""Rows of a source, by their number, as payloads of tasks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.build import INDEX, check_of, meta_of
from paceline.data.readers import parsed
from paceline.data.shape import RowShape
from paceline.errors import InvalidError

_RECORD = np.dtype(
    [("file", "<u4"), ("size", "<u4"), ("offset", "<u8"), ("check", "<u8"), ("split", "<u8")]
)
_RESOLUTION = 1 << 53  # of shares of a split


class IndexedRows:
    """An open index: 32 bytes a row, mapped from a file, and one read for each row asked for."""

    def __init__(self, folder: Path, shape: RowShape, *, name: str) -> None:
        """`name`: of the source, in messages."""
        meta = meta_of(folder)
        self.name, self.digest = name, str(meta["digest"])
        """Name, and SHA-256 of the content: of the file, or of the names and digests of several."""
        self._shape = shape
        self._index: Any = np.memmap(folder / INDEX, dtype=_RECORD, mode="r")
        self._files = [os.open(folder / each, os.O_RDONLY) for each in meta["files"]]
        weakref.finalize(self, _close, self._files)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        """The payload of the task that a row is.

        Raises:
            IndexError: there is no such row.
            InvalidError: it is not what it was when the job was submitted.
        """
        if not 0 <= row < len(self._index):
            raise IndexError(row)
        record = self._index[row]
        size, offset = int(record["size"]), int(record["offset"])
        line = os.pread(self._files[int(record["file"])], size, offset)
        if check_of(line) != int(record["check"]):
            raise InvalidError(
                f"{self.name}: row {row} has changed since it was read at submit; data of a "
                "running job must stay as they are: put changed ones into another file"
            )
        return self._shape.payload(parsed(line))

    def heldout(self, share: float) -> Any:
        """For each row, whether it is in the held-out part; a larger share has the same and more.

        What a row asks decides, so rows that are added or moved change nothing for the others.
        """
        keys: Any = self._index["split"]
        return (keys >> np.uint64(11)) < np.uint64(round(share * _RESOLUTION))


def _close(files: Sequence[int]) -> None:
    for each in files:
        os.close(each)
