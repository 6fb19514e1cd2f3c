"""Rows of a source, by their number, as payloads of tasks."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.build import INDEX, check_of, meta_of
from paceline.data.readers import parsed
from paceline.data.shape import RowShape
from paceline.errors import InvalidError, UnavailableError
from paceline.platform.beneath import ReadableFolders

_RECORD = np.dtype(
    [("file", "<u4"), ("size", "<u4"), ("offset", "<u8"), ("check", "<u8"), ("split", "<u8")]
)
_RESOLUTION = 1 << 53  # of shares of a split
# An item for each file of rows that this process may still hold open; it may have 256 files of
# any kind on some laptops. No semaphore: finalizers run anywhere, also inside one of its methods.
_MAY_HOLD: deque[None] = deque([None] * 128)


class IndexedRows:
    """An open index: 32 bytes a row, mapped from a file, and one read for each row asked for."""

    def __init__(
        self, folder: Path, shape: RowShape, *, name: str, folders: ReadableFolders
    ) -> None:
        """`name`: of the source, in messages. `folders`: where its files may be."""
        meta = meta_of(folder)
        self.name, self.digest = name, str(meta["digest"])
        """Name, and SHA-256 of the content: of the file, or of the names and digests of several."""
        self._shape = shape
        self._index: Any = np.memmap(folder / INDEX, dtype=_RECORD, mode="r")
        self._files = _Files(folder, meta["files"], folders)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        """The payload of the task that a row is.

        Raises:
            IndexError: there is no such row.
            InvalidError: it is not what it was when the job was submitted.
            UnavailableError: its file cannot be read.
        """
        if not 0 <= row < len(self._index):
            raise IndexError(row)
        record = self._index[row]
        size, offset = int(record["size"]), int(record["offset"])
        try:
            line = self._files.read(int(record["file"]), size, offset)
        except OSError as error:
            text = f"{self.name}: row {row}: cannot be read: {error.strerror or error}"
            raise UnavailableError(text) from None
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


class _Files:
    """The files of an index: held open as far as `_MAY_HOLD` has room, else opened for each read.

    Those of the index itself are always held, as its folder is deleted when others need room.
    """

    def __init__(self, folder: Path, names: Sequence[str], folders: ReadableFolders) -> None:
        self._names, self._folders = names, folders
        self._own, self._others = dict[int, int](), dict[int, int]()
        weakref.finalize(self, _close, self._own, self._others)
        for at, name in enumerate(names):
            if not name.startswith("/"):
                self._own[at] = os.open(folder / name, os.O_RDONLY)
            elif _MAY_HOLD:
                with folders.open(name, name) as opened:
                    self._others[at] = os.dup(opened.fileno())
                _MAY_HOLD.pop()

    def read(self, at: int, size: int, offset: int) -> bytes:
        """Bytes of a file by its position in the list; raises OSError."""
        held = self._own.get(at, self._others.get(at))
        if held is not None:
            return os.pread(held, size, offset)
        name = self._names[at]
        with self._folders.open(name, name) as opened:
            return os.pread(opened.fileno(), size, offset)


def _close(own: dict[int, int], others: dict[int, int]) -> None:
    for each in (*own.values(), *others.values()):
        os.close(each)
    _MAY_HOLD.extend([None] * len(others))
