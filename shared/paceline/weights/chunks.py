"""A snapshot in memory that is being filled while it is already served."""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Iterator

from paceline.errors import IntegrityError, StateError
from paceline.v1 import weights_pb2 as pb
from paceline.weights.manifest import ALIGNMENT, Header, Seals, TensorEntry, frame, header_to


class Staging:
    """One snapshot, being filled or whole.

    There is one writer: a producer (`fill`, then `finish`) or a receiver (`put`, then `confirm`),
    in any thread. There are any number of readers in any event loop. A chunk is *ready* once its
    digest is known, and then never changes; only ready chunks are served.
    """

    def __init__(self, header: Header, *, key: bytes = b"") -> None:
        self.header = header
        self.key = key
        self.complete = False
        self.root = ""
        self._seals = Seals(header, key)
        self._memory = bytearray(header.num_bytes)
        self._view = memoryview(self._memory)
        self._digests: list[bytes] = []  # of the chunks ready, which are the first ones
        self._position = 0
        self._hasher = self._seals.root()
        self._gone = False
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def num_ready(self) -> int:
        """Chunks `[0, num_ready)` are ready."""
        return len(self._digests)

    def buffer(self) -> memoryview:
        """All bytes; meaningful where chunks are ready."""
        return self._view

    def tensors(self) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Each tensor with its bytes; only of a complete snapshot."""
        if not self.complete:
            raise StateError(f"weights: version {self.header.version} is not complete")
        for entry in self.header.tensors:
            yield entry, self._view[entry.offset : entry.offset + entry.num_bytes]

    def fill(self, offset: int, data: bytes | memoryview) -> None:
        """Producer: the next bytes, in order; only padding between tensors may be left out."""
        view = memoryview(data)
        if view.nbytes == 0:
            return
        self._skip_to(offset)
        end = offset + view.nbytes
        if end > self.header.num_bytes:
            raise StateError(f"weights: bytes up to {end} of {self.header.num_bytes}")
        self._view[offset:end] = view.cast("B")
        self._advance(end)

    def finish(self) -> None:
        """Producer: no more bytes follow."""
        self._skip_to(self.header.num_bytes)
        self._advance(self.header.num_bytes)
        self._complete()

    def slot(self, index: int) -> memoryview:
        """Receiver: where the bytes of a chunk go; what is written there still has to be `put`."""
        start, end = self.header.chunk_range(index)
        return self._view[start:end]

    def put(self, index: int, data: memoryview, digest: bytes) -> None:
        """Receiver: the next chunk; `data` may be its `slot`. Raises `IntegrityError`."""
        start, end = self.header.chunk_range(index)
        if index != self.num_ready or data.nbytes != end - start:
            raise StateError(f"weights: chunk {index} of {data.nbytes} bytes is not the next one")
        own = self._seals.digest(data)
        if not hmac.compare_digest(own, digest):
            raise IntegrityError(
                f"weights: chunk {index} of version {self.header.version} differs from its digest"
            )
        if data.obj is not self._memory:
            self._view[start:end] = data
        self._add(own)

    def confirm(self, root: bytes, authentication: bytes) -> None:
        """Receiver: the trailer has come. Raises `IntegrityError` when it does not fit."""
        if self.num_ready != self.header.num_chunks:
            raise StateError(f"weights: {self.num_ready} of {self.header.num_chunks} chunks")
        own = self._hasher.digest()
        expected = self._seals.trailer_auth(own)
        if not hmac.compare_digest(own, root) or (
            self.key and not hmac.compare_digest(expected, authentication)
        ):
            raise IntegrityError(f"weights: root of version {self.header.version} differs")
        self._complete()

    def abandon(self) -> None:
        """Nothing more will come: readers that wait get a `StateError`."""
        self._gone = True
        self._wake()

    async def wait(self, index: int) -> None:
        """Return once chunk `index` is ready; with `num_chunks`, once the snapshot is complete."""
        while not self._has(index):
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            with self._lock:
                self._waiters.append((loop, future))
            # Without this look a chunk that came before the append would be slept through.
            if not self._has(index):
                await future

    def header_frame(self) -> bytes:
        """The header as it goes over the wire."""
        message = header_to(self.header)
        message.authentication = self._seals.header_auth
        return frame(message)

    def chunk_frame(self, index: int) -> bytes:
        """What goes before the bytes of a ready chunk."""
        start, end = self.header.chunk_range(index)
        return frame(pb.ChunkHead(index=index, num_bytes=end - start, digest=self._digests[index]))

    def trailer_frame(self) -> bytes:
        """The trailer of a complete snapshot."""
        root = bytes.fromhex(self.root)
        return frame(pb.SnapshotTrailer(root=root, authentication=self._seals.trailer_auth(root)))

    def _has(self, index: int) -> bool:
        if self.complete or (index < self.header.num_chunks and index < self.num_ready):
            return True
        if self._gone:
            raise StateError(f"weights: version {self.header.version} was abandoned")
        return False

    def _skip_to(self, offset: int) -> None:
        if not 0 <= offset - self._position < ALIGNMENT:
            raise StateError(
                f"weights: bytes {self._position} to {offset} were not filled in order"
            )

    def _advance(self, position: int) -> None:
        self._position = position
        while self.num_ready < self.header.num_chunks:
            start, end = self.header.chunk_range(self.num_ready)
            if end > position:
                break
            self._add(self._seals.digest(self._view[start:end]))

    def _add(self, digest: bytes) -> None:
        self._hasher.update(digest)
        self._digests.append(digest)
        self._wake()

    def _complete(self) -> None:
        self.root = self._hasher.hexdigest()
        self.complete = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_release, future)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
