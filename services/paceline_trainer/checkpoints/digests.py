"""Digests of files: computed while they are written, compared before they are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blake3 import blake3

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and digest of a file."""

    num_bytes: int
    digest: str  # blake3, in hex


class DigestingStream:
    """A stream that is written from its beginning to its end, and digests what is written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hasher = blake3()
        self._num_bytes = 0

    @property
    def written(self) -> FileDigest:
        """Size and digest of all data written so far."""
        return FileDigest(self._num_bytes, self._hasher.hexdigest())

    def write(self, data: Any) -> None:
        """Append the bytes of a buffer."""
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        self._num_bytes += view.nbytes
        self._stream.write(view)


def digest_of(stream: Any) -> FileDigest:
    """Digest of a stream, which is read to its end in blocks of `BLOCK_BYTES`."""
    hasher, num_bytes = blake3(), 0
    while block := stream.read(BLOCK_BYTES):
        hasher.update(block)
        num_bytes += len(block)
    return FileDigest(num_bytes, hasher.hexdigest())
