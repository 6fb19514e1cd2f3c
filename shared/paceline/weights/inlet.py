"""One stream of chunks from one peer, into a staging."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import IntegrityError
from paceline.weights import delta, frames
from paceline.weights.frames import ChunkFrame, Frame, HeaderFrame, TrailerFrame, WaitingFrame
from paceline.weights.pace import Pace
from paceline.weights.staging import Staging
from paceline.weights.stream import Response, Stalled
from paceline.weights.threads import in_thread

_MIN_SILENCE_S = 0.5
_MAX_CHUNK_S = 30.0  # of which bytes trickle in
_MAX_STARVED_S = 30.0  # signs of life and no chunk
_NUM_SLOW = 3
_WAITING_PER_S = 20.0
_ON_LOOP_BYTES = 1 << 20  # digested faster than handed to a thread and back
_MAX_UNVERIFIED = 2
_BATCH_S = 0.005
_MAX_BATCH_BYTES = 128 << 10


@dataclass(slots=True)
class Counts:
    """What came."""

    num_bytes: int = 0  # of the snapshot
    full_bytes: int = 0  # on the wire, of whole chunks
    delta_bytes: int = 0  # on the wire, of differences
    busy_s: float = 0.0  # in which chunks were on their way
    verify_s: float = 0.0
    decode_s: float = 0.0

    @property
    def wire_bytes(self) -> int:
        """All payload on the wire."""
        return self.full_bytes + self.delta_bytes


class Inlet:
    """Reads frames and chunks, verifies them, and knows how fast they come.

    `clock` gives seconds; `pace` caps the rate at which bytes are taken.
    """

    def __init__(self, *, clock: Callable[[], float], pace: Pace) -> None:
        self.latency_s = 0.0
        self.counts = Counts()  # since `take`
        self._clock = clock
        self._pace = pace
        self._started_s = clock()
        self._response: Response | None = None
        self._asked: set[int] = set()
        self._base: Staging | None = None
        self._unverified: deque[asyncio.Task[None]] = deque()
        self._num_waiting = 0
        self._seen_bytes = 0
        self._silent_s = 0.0
        self._paused = False  # by ourselves
        self._in_chunk = False  # one is on its way
        self._in_chunk_s = 0.0
        self._starved_s = 0.0  # without a whole chunk
        self._limit_s = _MIN_SILENCE_S
        self._num_slow = 0
        self._slow = False

    async def open(self, response: Response) -> HeaderFrame:
        """The header, when the peer has it. Raises `IntegrityError`, `UnavailableError`."""
        self._response = response
        frame = await self._frame(first=True)
        self.latency_s = self._clock() - self._started_s
        while isinstance(frame, WaitingFrame):
            self._waited()
            frame = await self._frame(first=True)
        if not isinstance(frame, HeaderFrame):
            raise IntegrityError("weights: the stream does not begin with a header")
        return frame

    async def receive(
        self, staging: Staging, asked: Sequence[int], *, base: Staging | None
    ) -> bool:
        """The chunks asked for, up to the trailer; False: its sender does not hold all chunks.

        Those that came are verified before this ends, in whatever way. Raises `IntegrityError`,
        `UnavailableError`.
        """
        self._asked = set(asked)
        self._base = base if base and base.header.same_layout(staging.header) else None
        try:
            return await self._receive(staging)
        finally:
            await self._settle()

    def look(self, expected_s: float, passed_s: float) -> bool:
        """Called every `passed_s`: cut a stream that is silent; whether it has become slow.

        A chunk is expected to take `expected_s`. Only time in which this process ran is counted
        against the peer.
        """
        if self._response is None:
            return False
        limit_s = self._limit_s = max(3 * expected_s, _MIN_SILENCE_S)
        moved = self._paused or self._response.num_received != self._seen_bytes
        self._seen_bytes = self._response.num_received
        self._silent_s = 0.0 if moved else self._silent_s + passed_s
        if not moved:
            self._response.batch(1)  # a little may have come
        self._in_chunk_s += passed_s if self._in_chunk else 0.0
        self._starved_s += passed_s
        if self._silent_s >= limit_s:
            self._cut(f"no byte for {self._silent_s:.1f} s")
        elif self._in_chunk_s > max(10 * limit_s, _MAX_CHUNK_S):
            self._cut(f"one chunk takes {self._in_chunk_s:.1f} s")
        elif self._starved_s > max(10 * limit_s, _MAX_STARVED_S):
            self._cut(f"no chunk for {self._starved_s:.1f} s")
        was, self._slow = self._slow, self._num_slow >= _NUM_SLOW or self._in_chunk_s > 3 * limit_s
        return self._slow and not was

    def take(self) -> Counts:
        """What came since the last call, which is forgotten."""
        taken, self.counts = self.counts, Counts()
        return taken

    def close(self) -> None:
        """Drop the connection."""
        if self._response is not None:
            self._response.close()

    def _cut(self, why: str) -> None:
        if self._response is not None:
            self._response.close(Stalled(f"weights: the peer has stalled: {why}"))

    async def _receive(self, staging: Staging) -> bool:
        while True:
            match await self._frame():
                case ChunkFrame() as frame:
                    await self._chunk(frame, staging)
                case WaitingFrame():
                    self._waited()
                case TrailerFrame() as frame:
                    await self._settle()
                    staging.confirm(frame)
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
        frames.check_chunk(frame, staging.header, base_version=base_version)
        if frame.index not in self._asked:
            raise IntegrityError(f"weights: chunk {frame.index} was not asked for, or came twice")
        self._asked.discard(frame.index)
        is_delta = frame.base_version is not None
        start_s, self._in_chunk = self._clock(), True
        slot = staging.slot(frame.index)
        data = memoryview(bytearray(frame.num_bytes)) if is_delta else slot
        await self._response.read_into(data)
        took_s = self._clock() - start_s
        self._response.batch(min(int(data.nbytes / max(took_s, 1e-6) * _BATCH_S), _MAX_BATCH_BYTES))
        self._arrived(slot.nbytes, data.nbytes, took_s, is_delta)
        if not is_delta and slot.nbytes <= _ON_LOOP_BYTES:
            self._timed_verify(staging, frame)
            self._accept(staging, frame)
        else:
            await self._verify_later(staging, frame, bytes(data) if is_delta else None)
        self._paused = True
        await self._pace.take(frame.num_bytes)
        self._paused = False

    async def _verify_later(
        self, staging: Staging, frame: ChunkFrame, payload: bytes | None
    ) -> None:
        """In a thread, while the next chunk arrives."""
        self._paused = True
        while len(self._unverified) >= _MAX_UNVERIFIED:
            await self._unverified.popleft()
        self._paused = False
        verifying = self._verify_in_thread(staging, frame, payload)
        self._unverified.append(asyncio.create_task(verifying, name="verify"))

    async def _settle(self) -> None:
        """Until all that came is verified, also if some of it is damaged."""
        self._paused = True
        damaged = ""  # the text: a local exception and its traceback would keep each other
        while self._unverified:
            try:
                await self._unverified.popleft()
            except IntegrityError as error:
                damaged = str(error)
        if damaged:
            raise IntegrityError(damaged)

    async def _verify_in_thread(
        self, staging: Staging, frame: ChunkFrame, payload: bytes | None
    ) -> None:
        if payload is not None:
            await in_thread(self._decode, staging, frame.index, payload)
        await in_thread(self._timed_verify, staging, frame)
        self._accept(staging, frame, payload)

    def _decode(self, staging: Staging, index: int, payload: bytes) -> None:
        assert self._base is not None
        started_s = self._clock()
        delta.decode_into(payload, self._base.beside(staging, index), staging.slot(index))
        self.counts.decode_s += self._clock() - started_s

    def _timed_verify(self, staging: Staging, frame: ChunkFrame) -> None:
        started_s = self._clock()
        staging.verify(frame.index, frame.digest)
        self.counts.verify_s += self._clock() - started_s

    def _accept(self, staging: Staging, frame: ChunkFrame, payload: bytes | None = None) -> None:
        if self._base is not None:
            # Before the chunk is shown to readers, who pass on what came.
            staging.keep_delta(frame.index, self._base.header.version, payload)
        staging.accept(frame.index, frame.digest)

    def _arrived(self, num_bytes: int, wire_bytes: int, took_s: float, is_delta: bool) -> None:
        self._in_chunk, self._in_chunk_s, self._starved_s = False, 0.0, 0.0
        self._num_slow = self._num_slow + 1 if took_s > self._limit_s else 0
        self.counts.num_bytes += num_bytes
        self.counts.busy_s += took_s
        if is_delta:
            self.counts.delta_bytes += wire_bytes
        else:
            self.counts.full_bytes += wire_bytes

    def _waited(self) -> None:
        self._num_slow = 0
        self._num_waiting += 1
        allowed = 10 + _WAITING_PER_S * (self._clock() - self._started_s)
        if self._num_waiting > allowed:
            raise IntegrityError(f"weights: {self._num_waiting} frames without a chunk in them")
