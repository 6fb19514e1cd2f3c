"""Digests of files: taken as they are written, compared before they are read."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a file was when it was written; an empty digest is not compared."""

    num_bytes: int
    digest: str = ""  # blake3, in hex


class DigestWriter(FsspecWriter):
    """Torch's writer, which also tells what it has written, by names of files."""

    def __init__(self, path: str, *, sync_files: bool) -> None:
        super().__init__(path, sync_files=sync_files)
        self.fs = self._hashing = _HashingFiles()
        self.path = self.fs.init_path(path)

    def written(self) -> dict[str, Sealed]:
        """By this rank so far."""
        return {
            name: Sealed(stream.num_bytes, stream.digest)
            for name, stream in self._hashing.streams.items()
        }


class _HashingFiles(FileSystem):
    """Files that are written front to back, once."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, _HashingStream] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Opened; what goes in is digested on its way."""
        with super().create_stream(path, mode) as stream:
            if "r" in mode:
                yield stream
                return
            hashing = self.streams[_name(path)] = _HashingStream(stream)
            yield hashing  # pyright: ignore[reportReturnType]

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """As the file does, its digest gets another name."""
        super().rename(path, new_path)
        if _name(path) in self.streams:
            self.streams[_name(new_path)] = self.streams.pop(_name(path))


class _HashingStream:
    """Passes everything on to a stream; it cannot be written but at its end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hasher = blake3()
        self.num_bytes = 0

    @property
    def digest(self) -> str:
        """Of all that was written."""
        return self._hasher.hexdigest()

    def write(self, data: Any) -> int:
        """To the end."""
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        self.num_bytes += view.nbytes
        return self._stream.write(data)

    def seek(self, *_: Any) -> int:
        """Refused: the digest is of bytes in their order."""
        raise io.UnsupportedOperation("seek")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def digest_of(stream: Any) -> Sealed:
    """What a file is now, read to its end in blocks of `BLOCK_BYTES`."""
    hasher, num_bytes = blake3(), 0
    while block := stream.read(BLOCK_BYTES):
        hasher.update(block)
        num_bytes += len(block)
    return Sealed(num_bytes, hasher.hexdigest())


def _name(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).rsplit("/", 1)[-1]
