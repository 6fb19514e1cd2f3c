"""Reads the chunk stream of one peer into a staging, and verifies every chunk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from paceline.errors import IntegrityError, PacelineError
from paceline.weights.snapshot import delta
from paceline.weights.snapshot.staging import Staging
from paceline.weights.snapshot.threads import in_thread
from paceline.weights.stream import frames
from paceline.weights.stream.frames import (
    ChunkFrame,
    Frame,
    HeaderFrame,
    TrailerFrame,
    WaitingFrame,
)
from paceline.weights.stream.http import Response, Stalled
from paceline.weights.stream.rate_limit import RateLimit

_MIN_SILENCE_S = 0.5
_MAX_CHUNK_S = 30.0  # for a chunk whose bytes trickle in
_MAX_STARVED_S = 30.0  # with keepalives but no chunk
_MIN_SLOW_CHUNKS = 3
_MAX_KEEPALIVES_PER_S = 20.0
_ON_LOOP_BYTES = 1 << 20  # hashed faster than handed to a thread and back
_MAX_UNVERIFIED = 2
_BATCH_S = 0.005
_MAX_BATCH_BYTES = 128 << 10


class HeldDiffersError(PacelineError):
    """Frozen bytes of the version held are not those of this one: ask again without it."""


@dataclass(slots=True)
class ReadCounts:
    """Bytes received and time spent on them."""

    num_bytes: int = 0  # of the snapshot
    full_bytes: int = 0  # on the wire, of whole chunks
    delta_bytes: int = 0  # on the wire, of deltas
    busy_s: float = 0.0  # receiving chunks
    verify_s: float = 0.0
    decode_s: float = 0.0

    @property
    def wire_bytes(self) -> int:
        """All payload bytes on the wire."""
        return self.full_bytes + self.delta_bytes


class ChunkReader:
    """Reads frames and chunks, verifies them, and measures how fast they arrive.

    `clock` gives seconds; `pace` caps the rate at which bytes are read.
    """

    def __init__(self, *, clock: Callable[[], float], pace: RateLimit) -> None:
        self.latency_s = 0.0
        self.counts = ReadCounts()  # since `take`
        self._clock = clock
        self._pace = pace
        self._started_s = clock()
        self._response: Response | None = None
        self._requested: set[int] = set()
        self._base: Staging | None = None
        self._held: Staging | None = None
        self._unverified: deque[asyncio.Task[None]] = deque()
        self._num_keepalives = 0
        self._seen_bytes = 0
        self._silent_s = 0.0
        self._paused = False  # this side is not reading
        self._in_chunk = False  # between the first and last byte of one
        self._in_chunk_s = 0.0
        self._starved_s = 0.0  # without a complete chunk
        self._limit_s = _MIN_SILENCE_S
        self._num_slow = 0
        self._slow = False

    async def open(self, response: Response) -> HeaderFrame:
        """Wait for the header. Raises `IntegrityError`, `UnavailableError`."""
        self._response = response
        frame = await self._frame(first=True)
        self.latency_s = self._clock() - self._started_s
        while isinstance(frame, WaitingFrame):
            self._count_keepalive()
            frame = await self._frame(first=True)
        if not isinstance(frame, HeaderFrame):
            raise IntegrityError("weights: the stream does not begin with a header")
        return frame

    async def receive(
        self,
        staging: Staging,
        requested: Sequence[int],
        *,
        base: Staging | None,
        held: Staging | None = None,
    ) -> bool:
        """Receive the requested chunks and the trailer; False: the sender does not hold all chunks.

        Chunks that arrived are verified before this returns or raises. Deltas are against `base`,
        frozen chunks are copied from `held`. Raises `IntegrityError`, `UnavailableError`,
        `HeldDiffersError`.
        """
        self._requested = set(requested)
        self._base = base if base and base.header.same_layout(staging.header) else None
        self._held = held
        if held is not None and not held.header.same_layout(staging.header):
            raise HeldDiffersError(f"weights: the layout of version {held.header.version} differs")
        try:
            return await self._receive(staging)
        finally:
            await self._drain_verifications()

    def check_progress(self, expected_s: float, passed_s: float) -> bool:
        """Close a stalled stream; return whether the stream has just become slow.

        Call it every `passed_s`; a chunk is expected to take `expected_s`. Time in which this
        process did not run does not count against the peer.
        """
        if self._response is None:
            return False
        limit_s = self._limit_s = max(3 * expected_s, _MIN_SILENCE_S)
        moved = self._paused or self._response.num_received != self._seen_bytes
        self._seen_bytes = self._response.num_received
        self._silent_s = 0.0 if moved else self._silent_s + passed_s
        if not moved:
            self._response.batch(1)  # the kernel may hold back a few bytes
        self._in_chunk_s += passed_s if self._in_chunk else 0.0
        self._starved_s += passed_s
        if self._silent_s >= limit_s:
            self._abort(f"no byte for {self._silent_s:.1f} s")
        elif self._in_chunk_s > max(10 * limit_s, _MAX_CHUNK_S):
            self._abort(f"one chunk takes {self._in_chunk_s:.1f} s")
        elif self._starved_s > max(10 * limit_s, _MAX_STARVED_S):
            self._abort(f"no chunk for {self._starved_s:.1f} s")
        was, self._slow = (
            self._slow,
            self._num_slow >= _MIN_SLOW_CHUNKS or self._in_chunk_s > 3 * limit_s,
        )
        return self._slow and not was

    def take(self) -> ReadCounts:
        """The counts since the last call; resets them."""
        taken, self.counts = self.counts, ReadCounts()
        return taken

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()

    def _abort(self, why: str) -> None:
        if self._response is not None:
            self._response.close(Stalled(f"weights: the peer has stalled: {why}"))

    async def _receive(self, staging: Staging) -> bool:
        while True:
            match await self._frame():
                case ChunkFrame() as frame:
                    await self._chunk(frame, staging)
                case WaitingFrame():
                    self._count_keepalive()
                case TrailerFrame() as frame:
                    await self._drain_verifications()
                    staging.verify_trailer(frame)
                    return bool(frame.root)
                case HeaderFrame():
                    raise IntegrityError("weights: a second header in one stream")

    async def _frame(self, *, first: bool = False) -> Frame:
        assert self._response is not None
        length = await self._response.read(frames.LENGTH.size)
        num_bytes = frames.parse_length(length, first=first)
        return frames.parse(await self._response.read(num_bytes))

    async def _chunk(self, frame: ChunkFrame, staging: Staging) -> None:
        assert self._response is not None
        base_version = self._base.header.version if self._base else None
        held_version = self._held.header.version if self._held else None
        frames.check_chunk(
            frame, staging.header, base_version=base_version, held_version=held_version
        )
        if frame.index not in self._requested:
            raise IntegrityError(
                f"weights: chunk {frame.index} was not requested, or was sent twice"
            )
        self._requested.discard(frame.index)
        if not frame.num_bytes:
            self._starved_s, self._num_slow = 0.0, 0
            await self._later(self._copy_held(staging, frame))
            return
        is_delta = frame.base_version is not None
        start_s, self._in_chunk = self._clock(), True
        slot = staging.slot(frame.index)
        data = memoryview(bytearray(frame.num_bytes)) if is_delta else slot
        await self._response.read_into(data)
        took_s = self._clock() - start_s
        self._response.batch(min(int(data.nbytes / max(took_s, 1e-6) * _BATCH_S), _MAX_BATCH_BYTES))
        self._count_chunk(slot.nbytes, data.nbytes, took_s, is_delta)
        if not is_delta and slot.nbytes <= _ON_LOOP_BYTES:
            self._timed_verify(staging, frame)
            self._accept(staging, frame)
        else:
            payload = bytes(data) if is_delta else None
            await self._later(self._verify_in_thread(staging, frame, payload))
        self._paused = True
        await self._pace.take(frame.num_bytes)
        self._paused = False

    async def _later(self, verifying: Coroutine[None, None, None]) -> None:
        """Verify a chunk in a thread while the next one arrives."""
        self._paused = True
        while len(self._unverified) >= _MAX_UNVERIFIED:
            await self._unverified.popleft()
        self._paused = False
        self._unverified.append(asyncio.create_task(verifying, name="verify"))

    async def _drain_verifications(self) -> None:
        """Await all pending verifications, even if some fail."""
        self._paused = True
        damaged = differs = ""  # only the texts, since an exception and its traceback form a cycle
        while self._unverified:
            try:
                await self._unverified.popleft()
            except IntegrityError as error:
                damaged = str(error)
            except HeldDiffersError as error:
                differs = str(error)
        if damaged:
            raise IntegrityError(damaged)
        if differs:
            raise HeldDiffersError(differs)

    async def _verify_in_thread(
        self, staging: Staging, frame: ChunkFrame, payload: bytes | None
    ) -> None:
        if payload is not None:
            await in_thread(self._decode, staging, frame.index, payload)
        await in_thread(self._timed_verify, staging, frame)
        self._accept(staging, frame, payload)

    async def _copy_held(self, staging: Staging, frame: ChunkFrame) -> None:
        """Copy and verify a frozen chunk in a thread."""
        held, index = self._held, frame.index
        assert held is not None
        await in_thread(_copy, staging.slot(index), held.matching_range(staging, index))
        try:
            await in_thread(self._timed_verify, staging, frame)
        except IntegrityError as error:
            raise HeldDiffersError(str(error)) from None
        staging.accept(index, frame.digest)

    def _decode(self, staging: Staging, index: int, payload: bytes) -> None:
        assert self._base is not None
        started_s = self._clock()
        delta.decode_into(payload, self._base.matching_range(staging, index), staging.slot(index))
        self.counts.decode_s += self._clock() - started_s

    def _timed_verify(self, staging: Staging, frame: ChunkFrame) -> None:
        started_s = self._clock()
        staging.verify(frame.index, frame.digest)
        self.counts.verify_s += self._clock() - started_s

    def _accept(self, staging: Staging, frame: ChunkFrame, payload: bytes | None = None) -> None:
        if self._base is not None:
            # Before readers see the chunk, since they relay its delta.
            staging.keep_delta(frame.index, self._base.header.version, payload)
        staging.accept(frame.index, frame.digest)

    def _count_chunk(self, num_bytes: int, wire_bytes: int, took_s: float, is_delta: bool) -> None:
        self._in_chunk, self._in_chunk_s, self._starved_s = False, 0.0, 0.0
        self._num_slow = self._num_slow + 1 if took_s > self._limit_s else 0
        self.counts.num_bytes += num_bytes
        self.counts.busy_s += took_s
        if is_delta:
            self.counts.delta_bytes += wire_bytes
        else:
            self.counts.full_bytes += wire_bytes

    def _count_keepalive(self) -> None:
        self._num_slow = 0
        self._num_keepalives += 1
        limit = 10 + _MAX_KEEPALIVES_PER_S * (self._clock() - self._started_s)
        if self._num_keepalives > limit:
            raise IntegrityError(f"weights: {self._num_keepalives} frames without a chunk")


def _copy(target: memoryview, source: memoryview) -> None:
    target[:] = source
