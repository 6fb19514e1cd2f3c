"""A snapshot in memory that is being filled while it is already served."""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Iterator, Sequence

from paceline.errors import IntegrityError, StateError
from paceline.weights.frames import (
    ChunkFrame,
    TrailerFrame,
    chunk_frame,
    header_frame,
    trailer_frame,
)
from paceline.weights.manifest import ALIGNMENT, Header, TensorEntry
from paceline.weights.memory import Memory, Pool
from paceline.weights.seals import Seals


class Staging:
    """One snapshot, being filled or whole.

    There is one writer: a producer (`fill`, then `finish`) or a receiver (`put` in any order), in
    any thread. There are any number of readers in any event loop. A chunk is *ready* once its
    digest is known, and then never changes; only ready chunks are served. A seed of a part
    produces all bytes and answers only for the chunks with `index % parts == part`.
    """

    def __init__(
        self,
        header: Header,
        *,
        key: bytes = b"",
        part: int = 0,
        parts: int = 1,
        memory: Memory | None = None,
    ) -> None:
        self.header = header
        self.key = key
        self.part = part
        self.parts = parts
        self.complete = False
        self.root = ""  # of a snapshot whose chunks are all here
        self.seals = Seals(header, key)
        self._memory = memory or Pool().take(header.num_bytes)
        self._view = self._memory.view
        self._digests = [b""] * header.num_chunks
        self._order: list[int] = []
        self._deltas: dict[tuple[int, int], bytes | None] = {}
        self._position = 0
        self._next = part  # the producer's next chunk
        self._gone = False
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def num_ready(self) -> int:
        """How many chunks are ready."""
        return len(self._order)

    @property
    def num_own(self) -> int:
        """How many chunks will ever be ready."""
        return len(range(self.part, self.header.num_chunks, self.parts))

    @property
    def fd(self) -> int:
        """File descriptor of the bytes, which another process may map; -1: they have none.

        Whoever maps it holds this object too: its memory is used again when nobody does.
        """
        return self._memory.fd

    def buffer(self) -> memoryview:
        """All bytes; meaningful where chunks are ready."""
        return self._view

    def beside(self, other: Staging, index: int) -> memoryview:
        """The bytes in the place of a chunk of another snapshot with the same layout."""
        start, end = other.header.chunk_range(index)
        return self._view[start:end]

    def tensors(self) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Each tensor with its bytes; only of a complete snapshot."""
        if not self.complete:
            raise StateError(f"weights: version {self.header.version} is not complete")
        for entry in self.header.tensors:
            yield entry, self._view[entry.offset : entry.offset + entry.num_bytes]

    def is_ready(self, index: int) -> bool:
        """Whether that chunk is ready."""
        return bool(self._digests[index])

    def ready_since(self, cursor: int) -> Sequence[int]:
        """Chunks in the order in which they became ready, without the first `cursor` of them."""
        return self._order[cursor:]

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

    def verify(self, index: int, digest: bytes) -> None:
        """Receiver: compare what is in a slot, in any thread. Raises `IntegrityError`."""
        if not hmac.compare_digest(self.seals.digest(self.slot(index), index), digest):
            raise IntegrityError(
                f"weights: chunk {index} of version {self.header.version} differs from its digest"
            )

    def accept(self, index: int, digest: bytes) -> None:
        """Receiver: a chunk has been verified; with the last one the snapshot is complete."""
        if self.is_ready(index):
            raise StateError(f"weights: chunk {index} is here already")
        self._add(index, digest)
        if self.num_ready == self.header.num_chunks:
            self._complete()

    def put(self, index: int, digest: bytes) -> None:
        """Receiver: verify and accept. Raises `IntegrityError`."""
        self.verify(index, digest)
        self.accept(index, digest)

    def confirm(self, trailer: TrailerFrame) -> None:
        """Receiver: compare a sender's trailer with what is here. Raises `IntegrityError`."""
        if not trailer.root:
            return
        self.seals.check_trailer(trailer.root, trailer.authentication)
        if self.complete and self.root != trailer.root.hex():
            raise IntegrityError(f"weights: root of version {self.header.version} differs")

    def abandon(self) -> None:
        """Nothing more will come: readers that wait get a `StateError`."""
        self._gone = True
        self._wake()

    async def wait(self, count: int, *, timeout_s: float | None = None) -> bool:
        """Return once more than `count` chunks are ready, or the snapshot is complete.

        False: neither happened in time. Raises `StateError` when it was abandoned.
        """
        while not self._has(count):
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, _release, future)
            with self._lock:
                self._waiters.append((loop, future))
            try:
                # Without this look a chunk that came before the append would be slept through.
                if not self._has(count):
                    await future
            finally:
                self._forget(future, timer)
            if timeout_s is not None:
                return self._has(count)
        return True

    def keep_delta(self, index: int, base_version: int, payload: bytes | None) -> None:
        """A ready chunk as difference against a base, to pass on; None: that is not smaller."""
        self._deltas[base_version, index] = payload

    def has_delta(self, index: int, base_version: int) -> bool:
        """Whether it is known what `delta` would give."""
        return (base_version, index) in self._deltas

    def delta(self, index: int, base_version: int) -> bytes | None:
        """The difference that was kept; None if there is none."""
        return self._deltas.get((base_version, index))

    def header_frame(self) -> bytes:
        """The header as it goes over the wire."""
        return header_frame(self.header, self.seals.header_auth)

    def chunk_frame(
        self, index: int, *, num_bytes: int | None = None, base_version: int | None = None
    ) -> bytes:
        """What goes before the bytes of a ready chunk, or before a difference of that size."""
        if num_bytes is None:
            start, end = self.header.chunk_range(index)
            num_bytes = end - start
        return chunk_frame(ChunkFrame(index, num_bytes, self._digests[index], base_version))

    def trailer_frame(self) -> bytes:
        """The trailer; without a root as long as that is not known."""
        root = bytes.fromhex(self.root)
        authentication = self.seals.trailer_auth(root) if root else b""
        return trailer_frame(TrailerFrame(root, authentication))

    def _has(self, count: int) -> bool:
        if self.complete or self.num_ready > count:
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
        while self._next < self.header.num_chunks:
            start, end = self.header.chunk_range(self._next)
            if end > position:
                break
            self._add(self._next, self.seals.digest(self._view[start:end], self._next))
            self._next += self.parts

    def _add(self, index: int, digest: bytes) -> None:
        self._digests[index] = digest
        self._order.append(index)
        self._wake()

    def _complete(self) -> None:
        if self.num_ready == self.header.num_chunks:
            self.root = self.seals.root(b"".join(self._digests)).hex()
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
