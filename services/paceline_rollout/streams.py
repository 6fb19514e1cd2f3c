"""Requests of many callers on one engine: who asked what, until when, and what comes back."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from paceline.errors import UnavailableError
from paceline.interfaces import Emission, Engine, Generation
from paceline.tracing import NOTHING, OFF, Span, Tracer
from paceline_rollout.engines.base import refusal

MAX_TIMEOUT_S = 86_400.0
MAX_ID_CHARS = 256
LEAST_DEADLINES = 1024  # fewer are not worth tidying up
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as a caller made it."""

    generation: Generation
    min_version: int = -1
    timeout_s: float = 0.0  # 0: as long as the stream lives
    trace: str = ""  # W3C traceparent


class Stream:
    """One caller: what it has open and what is on the way to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.open: set[str] = set()
        self._ready: list[Emission] = []
        self._wake = asyncio.Event()
        self._half_closed = False

    def put(self, emission: Emission) -> None:
        """Something for the caller."""
        self._ready.append(emission)
        self._wake.set()

    def half_close(self) -> None:
        """The caller asks for nothing more; the stream ends when all is answered."""
        self._half_closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[Emission]]:
        """What came since the last batch."""
        while self._ready or self.open or not self._half_closed:
            await self._wake.wait()
            self._wake.clear()
            if self._ready:
                batch, self._ready = self._ready, []
                yield batch


@dataclass(slots=True)
class _Open:
    stream: Stream
    name: str  # the caller's
    weight: int  # tokens that the engine may have to hold for it
    pinned_version: int
    due: float
    end: tuple[str, str] | None = None  # error code and text that its abort stands for
    span: Span = NOTHING
    first_ns: int = 0  # its first tokens
    version: int = -1  # of its newest tokens


class _Occupancy:
    """Requests that are open, and for how long they all have been, added up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self._request_s = 0.0
        self._since = 0.0

    def note(self, count: int) -> float:
        """So many are open from now on; seconds of all so far."""
        now = self._clock()
        self._request_s += self._count * (now - self._since)
        self._count, self._since = count, now
        return self._request_s


class Hub:
    """Sends each emission of the engine to the stream that asked."""

    def __init__(self, *, engine: Engine, clock: Clock | None = None, tracer: Tracer = OFF) -> None:
        self._engine = engine
        self._tracer = tracer
        self._clock: Clock = clock or time.monotonic
        self._open: dict[str, _Open] = {}
        self._occupancy = _Occupancy(self._clock)
        self._num_streams = 0
        self.num_ended = 0  # requests that were answered to their end
        self._streams: set[Stream] = set()
        self._deadlines: list[tuple[float, str]] = []
        self._sooner = asyncio.Event()
        self._closed_with = ""

    @property
    def num_open(self) -> int:
        """Requests without an end."""
        return len(self._open)

    def attach(self) -> Stream:
        """A new caller."""
        self._num_streams += 1
        stream = Stream(self._num_streams)
        self._streams.add(stream)
        return stream

    def detach(self, stream: Stream) -> None:
        """A caller is gone: nobody wants its answers any more."""
        names = [_inner(stream, name) for name in stream.open]
        self._streams.discard(stream)
        stream.open.clear()
        for name in names:
            if one := self._open.pop(name, None):
                one.span.end(error="the caller is gone")
        if names:
            self._occupancy.note(len(self._open))
            self._engine.abort(names)

    def submit(self, stream: Stream, asks: Sequence[Ask]) -> None:
        """Requests of one message."""
        version = self._engine.status().version
        going: list[Generation] = []
        for ask in asks:
            code, text = self._refuse(stream, ask, version)
            if code:
                stream.put(refusal(ask.generation.request_id, code, text))
            else:
                going.append(self._admit(stream, ask))
        if going:
            self._occupancy.note(len(self._open))
            self._engine.submit(going)

    def abort(self, stream: Stream, names: Sequence[str]) -> None:
        """The caller gives up these; unknown ones are ignored."""
        self._engine.abort([_inner(stream, name) for name in names if name in stream.open])

    def abort_all(self, code: str, text: str) -> None:
        """End everything that is open with an error; callers keep the tokens they have."""
        for one in self._open.values():
            one.end = one.end or (code, text)
        self._engine.abort(list(self._open))

    def refuse_all(self, text: str) -> None:
        """From now on every request ends at once: go elsewhere."""
        self._closed_with = text
        self.abort_all("UNAVAILABLE", text)

    async def hand_back(self, text: str) -> None:
        """`refuse_all`, and wait until callers have been sent all that was sampled for them.

        The engine ends an aborted request with the tokens that it has not emitted yet.
        """
        self.refuse_all(text)
        while self._open:
            await asyncio.sleep(0.01)
        while self._streams:
            for stream in self._streams:
                stream.half_close()
            await asyncio.sleep(0.01)

    def load(self) -> dict[str, float]:
        """What callers that share this worker need to know of each other, and scaling of them.

        `open` leaves out requests for a version to come: they take no place in the engine yet.
        `request_s` is how long all requests so far have been open, added up.
        """
        version = self._engine.status().version
        now = [one for one in self._open.values() if one.pinned_version <= version]
        return {
            "open": float(len(now)),
            "open_tokens": float(sum(one.weight for one in now)),
            "callers": float(sum(bool(stream.open) for stream in self._streams)),
            "request_s": self._occupancy.note(len(self._open)),
        }

    async def run(self) -> None:
        """Pass emissions on and keep deadlines, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass_on(), name="emissions")
            group.create_task(self._keep_deadlines(), name="deadlines")

    def _refuse(self, stream: Stream, ask: Ask, version: int) -> tuple[str, str]:
        name = ask.generation.request_id
        if self._closed_with:
            return "UNAVAILABLE", self._closed_with
        if wrong := _problem(ask):
            return "INVALID_ARGUMENT", wrong
        if name in stream.open:
            return "INVALID_ARGUMENT", f"request_id: {name!r} is already open on this stream"
        if ask.min_version > version:
            text = f"min_version: {ask.min_version} is not there yet; version {version} is active"
            return "FAILED_PRECONDITION", text
        return "", ""

    def _admit(self, stream: Stream, ask: Ask) -> Generation:
        name = ask.generation.request_id
        inner = _inner(stream, name)
        stream.open.add(name)
        generation = ask.generation
        weight = len(generation.tokens) + generation.sampling.max_tokens
        due = self._clock() + ask.timeout_s if ask.timeout_s > 0 else math.inf
        one = _Open(stream, name, weight, generation.pinned_version, due)
        one.span = self._tracer.received(ask.trace).child("rollout", kind="server")
        self._open[inner] = one
        if due < math.inf:
            self._push_deadline(due, inner)
        return replace(generation, request_id=inner)

    def _push_deadline(self, due: float, inner: str) -> None:
        if not self._deadlines or due < self._deadlines[0][0]:
            self._sooner.set()
        heapq.heappush(self._deadlines, (due, inner))
        # Most requests end long before their time is over.
        if len(self._deadlines) > 2 * len(self._open) + LEAST_DEADLINES:
            self._deadlines = [(one.due, n) for n, one in self._open.items() if one.due < math.inf]
            heapq.heapify(self._deadlines)

    async def _pass_on(self) -> None:
        async for batch in self._engine.emissions():
            for emission in batch:
                self._route(emission)
        self._closed_with = "the engine has stopped"
        for name in list(self._open):
            self._route(refusal(name, "UNAVAILABLE", self._closed_with))
        raise UnavailableError(self._closed_with)

    def _route(self, emission: Emission) -> None:
        one = self._open.get(emission.request_id)
        if one is None:
            return
        if one.span:
            self._follow(one, emission)
        reason, code, error = emission.finish_reason, emission.error_code, emission.error
        if reason:
            del self._open[emission.request_id]
            self._occupancy.note(len(self._open))
            self.num_ended += 1
            one.stream.open.discard(one.name)
            if reason == "abort" and one.end is not None:
                reason, (code, error) = "error", one.end
        one.stream.put(
            Emission(
                request_id=one.name,
                tokens=emission.tokens,
                logprobs=emission.logprobs,
                versions=emission.versions,
                finish_reason=reason,
                matched_stop=emission.matched_stop,
                error_code=code,
                error=error,
            )
        )

    def _follow(self, one: _Open, emission: Emission) -> None:
        """Note what an emission says of a request whose trace is kept."""
        span, now = one.span, self._tracer.now()
        if emission.tokens:
            one.first_ns = one.first_ns or now
        for run in emission.versions:
            if 0 <= one.version < run.version:
                span.event("swap", version=run.version)
            one.version = run.version
        if emission.finish_reason:
            _stages(span, emission, one.first_ns or now)
            reason = emission.finish_reason
            span.set(version=one.version, **{"gen_ai.response.finish_reasons": [reason]})
            span.end(error=emission.error_code)

    async def _keep_deadlines(self) -> None:
        while True:
            self._sooner.clear()
            wait_s = self._deadlines[0][0] - self._clock() if self._deadlines else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._sooner.wait()
            except TimeoutError:
                self._expire()

    def _expire(self) -> None:
        late: list[str] = []
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            one = self._open.get(name)
            # A name may have been used again since, with another deadline.
            if one is not None and one.due <= now and one.end is None:
                one.end = ("DEADLINE_EXCEEDED", "timeout_s: has passed")
                late.append(name)
        if late:
            self._engine.abort(late)


def _stages(span: Span, end: Emission, first_ns: int) -> None:
    """Queue, prefill, decode; an engine that does not tell has its first tokens as the border."""
    begun, joined = span.start_ns, first_ns
    if end.queue_s >= 0:
        begun = span.start_ns + round(end.queue_s * 1e9)
        joined = begun + round(end.prefill_s * 1e9)
        span.past("queue", span.start_ns, begun)
    span.past("prefill", begun, joined, queue_told=end.queue_s >= 0)
    span.past("decode", joined)


def _problem(ask: Ask) -> str:
    """What is wrong with a request whatever the engine: field, value, what is allowed."""
    name, pinned, least = ask.generation.request_id, ask.generation.pinned_version, ask.min_version
    if not name:
        return f"request_id: is empty; allowed: 1 to {MAX_ID_CHARS} characters"
    if len(name) > MAX_ID_CHARS:
        return f"request_id: {len(name)} characters; allowed: at most {MAX_ID_CHARS}"
    # Written so that a NaN is refused.
    if not 0 <= ask.timeout_s <= MAX_TIMEOUT_S:
        return f"timeout_s: {ask.timeout_s}; allowed: 0 to {MAX_TIMEOUT_S:g}"
    if least < -1:
        return f"min_version: {least}; allowed: -1 or a version"
    if 0 <= pinned < least:
        return f"pinned_version: {pinned} is below min_version {least}; allowed: at least that"
    return ""


def _inner(stream: Stream, name: str) -> str:
    """The engine's name of a request: two callers may use the same one."""
    return f"{stream.number}/{name}"
