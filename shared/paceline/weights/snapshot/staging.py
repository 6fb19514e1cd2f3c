"""A snapshot in memory that is served while it is still being filled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

from paceline.errors import IntegrityError, StateError
from paceline.weights.snapshot.manifest import ALIGNMENT, SnapshotHeader, TensorEntry
from paceline.weights.snapshot.memory import SharedMemory, SharedMemoryPool
from paceline.weights.snapshot.verification import SnapshotAuthenticator
from paceline.weights.stream.frames import (
    ChunkFrame,
    TrailerFrame,
    chunk_frame,
    header_frame,
    trailer_frame,
)


class Staging:
    """One snapshot, partial or complete.

    It has one writer in any thread, either a producer (`fill`, then `finish`) or a receiver (`put`
    in any order), and any number of readers in any event loop. A chunk is *ready* once its digest
    is known; it never changes after that, and only ready chunks are served. A seed of one part
    fills in all bytes but serves only the chunks with `index % parts == part`.
    """

    def __init__(
        self,
        header: SnapshotHeader,
        *,
        key: bytes = b"",
        part: int = 0,
        parts: int = 1,
        memory: SharedMemory | None = None,
    ) -> None:
        self.header = header
        self.key = key
        self.part = part
        self.parts = parts
        self.complete = False
        self.root = ""  # hex digest, known once all chunks are ready
        self.authenticator = SnapshotAuthenticator(header, key)
        self._memory = memory or SharedMemoryPool().take(header.num_bytes)
        self._view = self._memory.view
        self._digests = [b""] * header.num_chunks
        self._order: list[int] = []
        self._deltas: dict[tuple[int, int], bytes | None] = {}
        self._position = 0
        self._next_chunk = part  # of the producer
        self._abandoned = False
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def num_ready(self) -> int:
        """How many chunks are ready."""
        return len(self._order)

    @property
    def num_own(self) -> int:
        """How many chunks this staging serves once it is finished."""
        return len(range(self.part, self.header.num_chunks, self.parts))

    @property
    def memory(self) -> SharedMemory:
        """Where the bytes are; without a reference to this object it is reused, unless lent."""
        return self._memory

    def buffer(self) -> memoryview:
        """All bytes; only those of ready chunks are meaningful."""
        return self._view

    def matching_range(self, other: Staging, index: int) -> memoryview:
        """The byte range of a chunk of `other`, a snapshot with the same layout."""
        start, end = other.header.chunk_range(index)
        return self._view[start:end]

    def tensors(self) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Each tensor with its bytes. Raises `StateError` unless the snapshot is complete."""
        if not self.complete:
            raise StateError(f"weights: version {self.header.version} is not complete")
        for entry in self.header.tensors:
            yield entry, self._view[entry.offset : entry.offset + entry.num_bytes]

    def is_ready(self, index: int) -> bool:
        """Whether a chunk is ready."""
        return bool(self._digests[index])

    def ready_since(self, cursor: int) -> Sequence[int]:
        """Chunks in the order in which they became ready, from position `cursor` on."""
        return self._order[cursor:]

    def fill(self, offset: int, data: bytes | memoryview) -> None:
        """Producer: append bytes, in order; only the padding between tensors may be skipped."""
        view = memoryview(data)
        if view.nbytes == 0:
            return
        self._skip_to(offset)
        end = offset + view.nbytes
        if end > self.header.num_bytes:
            raise StateError(f"weights: byte {end} is beyond the end at {self.header.num_bytes}")
        self._view[offset:end] = view.cast("B")
        self._advance(end)

    def finish(self) -> None:
        """Producer: all bytes have been filled in."""
        self._skip_to(self.header.num_bytes)
        self._advance(self.header.num_bytes)
        self._complete()

    def slot(self, index: int) -> memoryview:
        """Receiver: the buffer to write a chunk into, before `put`."""
        start, end = self.header.chunk_range(index)
        return self._view[start:end]

    def verify(self, index: int, digest: bytes) -> None:
        """Receiver: check the bytes in a slot, in any thread. Raises `IntegrityError`."""
        self.authenticator.check_chunk(self.slot(index), index, digest)

    def accept(self, index: int, digest: bytes) -> None:
        """Receiver: mark a verified chunk as ready; the last one completes the snapshot."""
        if self.is_ready(index):
            raise StateError(f"weights: chunk {index} is already ready")
        self._add(index, digest)
        if self.num_ready == self.header.num_chunks:
            self._complete()

    def put(self, index: int, digest: bytes) -> None:
        """Receiver: verify and accept. Raises `IntegrityError`."""
        self.verify(index, digest)
        self.accept(index, digest)

    def verify_trailer(self, trailer: TrailerFrame) -> None:
        """Receiver: check a sender's trailer and its root. Raises `IntegrityError`."""
        if not trailer.root:
            return
        self.authenticator.check_trailer(trailer.root, trailer.authentication)
        if self.complete and self.root != trailer.root.hex():
            raise IntegrityError(f"weights: root of version {self.header.version} differs")

    def verify_all(self) -> None:
        """Check all bytes of a complete snapshot once more. Raises `IntegrityError`."""
        for index, digest in enumerate(self._digests):
            if digest:  # a seed of one part has not digested the others
                self.verify(index, digest)

    def abandon(self) -> None:
        """Give up on the snapshot: waiting readers get a `StateError`."""
        self._abandoned = True
        self._wake()

    async def wait(self, count: int, *, timeout_s: float | None = None) -> bool:
        """Wait until more than `count` chunks are ready, or the snapshot is complete.

        False: neither happened in time. Raises `StateError` when the snapshot is abandoned.
        """
        while not self._is_beyond(count):
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, _release, future)
            with self._lock:
                self._waiters.append((loop, future))
            try:
                # A chunk may have become ready just before the future was registered.
                if not self._is_beyond(count):
                    await future
            finally:
                self._forget(future, timer)
            if timeout_s is not None:
                return self._is_beyond(count)
        return True

    def keep_delta(self, index: int, base_version: int, payload: bytes | None) -> None:
        """Keep the delta of a ready chunk against a base, to relay; None if it is not smaller."""
        self._deltas[base_version, index] = payload

    def has_delta(self, index: int, base_version: int) -> bool:
        """Whether the delta was computed, even if it was not smaller than the chunk."""
        return (base_version, index) in self._deltas

    def delta(self, index: int, base_version: int) -> bytes | None:
        """The delta that was kept, or None."""
        return self._deltas.get((base_version, index))

    def header_frame(self) -> bytes:
        """The header frame as it goes over the wire."""
        return header_frame(self.header, self.authenticator.header_auth)

    def chunk_frame(
        self, index: int, *, num_bytes: int | None = None, base_version: int | None = None
    ) -> bytes:
        """The frame before the bytes of a ready chunk, or before a delta of `num_bytes`."""
        if num_bytes is None:
            start, end = self.header.chunk_range(index)
            num_bytes = end - start
        return chunk_frame(ChunkFrame(index, num_bytes, self._digests[index], base_version))

    def trailer_frame(self) -> bytes:
        """The trailer frame; its root is empty until all chunks are ready."""
        root = bytes.fromhex(self.root)
        authentication = self.authenticator.trailer_auth(root) if root else b""
        return trailer_frame(TrailerFrame(root, authentication))

    def _is_beyond(self, count: int) -> bool:
        if self.complete or self.num_ready > count:
            return True
        if self._abandoned:
            raise StateError(f"weights: version {self.header.version} was abandoned")
        return False

    def _skip_to(self, offset: int) -> None:
        if not 0 <= offset - self._position < ALIGNMENT:
            raise StateError(
                f"weights: bytes {self._position} to {offset} were not filled in order"
            )

    def _advance(self, position: int) -> None:
        self._position = position
        while self._next_chunk < self.header.num_chunks:
            start, end = self.header.chunk_range(self._next_chunk)
            if end > position:
                break
            self._add(
                self._next_chunk, self.authenticator.digest(self._view[start:end], self._next_chunk)
            )
            self._next_chunk += self.parts

    def _add(self, index: int, digest: bytes) -> None:
        self._digests[index] = digest
        self._order.append(index)
        self._wake()

    def _complete(self) -> None:
        if self.num_ready == self.header.num_chunks:
            self.root = self.authenticator.root(b"".join(self._digests)).hex()
        self.complete = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_release, future)

    def _forget(self, future: asyncio.Future[None], timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
        with self._lock:
            self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
