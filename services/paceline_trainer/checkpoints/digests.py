"""Digests of files: computed while they are written, compared before they are loaded."""

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
class FileDigest:
    """Size and digest of a file; an empty digest is not compared."""

    num_bytes: int
    digest: str = ""  # blake3, in hex


class DigestWriter(FsspecWriter):
    """Torch's writer, which also records the digests of the files it has written."""

    def __init__(self, path: str, *, sync_files: bool) -> None:
        super().__init__(path, sync_files=sync_files)
        self.fs = self._hashing = _HashingFileSystem()
        self.path = self.fs.init_path(path)

    def written(self) -> dict[str, FileDigest]:
        """The files that this rank has written so far, by name."""
        return {
            name: FileDigest(stream.num_bytes, stream.digest)
            for name, stream in self._hashing.streams.items()
        }


class _HashingFileSystem(FileSystem):
    """A file system that digests what is written; files are written sequentially, once."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, _HashingStream] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Open a file; what is written to it is digested."""
        with super().create_stream(path, mode) as stream:
            if "r" in mode:
                yield stream
                return
            hashing = self.streams[_file_name(path)] = _HashingStream(stream)
            yield hashing  # pyright: ignore[reportReturnType]

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file together with its digest."""
        super().rename(path, new_path)
        if _file_name(path) in self.streams:
            self.streams[_file_name(new_path)] = self.streams.pop(_file_name(path))


class _HashingStream:
    """Wraps a stream that is written sequentially, and digests it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hasher = blake3()
        self.num_bytes = 0

    @property
    def digest(self) -> str:
        """Digest of all data written so far."""
        return self._hasher.hexdigest()

    def write(self, data: Any) -> int:
        """Append data."""
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        self.num_bytes += view.nbytes
        return self._stream.write(data)

    def seek(self, *_: Any) -> int:
        """Unsupported, as the digest depends on the order of the bytes."""
        raise io.UnsupportedOperation("seek")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def digest_of(stream: Any) -> FileDigest:
    """Digest of a stream, which is read to its end in blocks of `BLOCK_BYTES`."""
    hasher, num_bytes = blake3(), 0
    while block := stream.read(BLOCK_BYTES):
        hasher.update(block)
        num_bytes += len(block)
    return FileDigest(num_bytes, hasher.hexdigest())


def _file_name(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).rsplit("/", 1)[-1]
