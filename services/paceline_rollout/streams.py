"""Multiplexes the requests of many callers onto one engine, with deadlines and aborts."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from paceline.enums import FinishReason
from paceline.errors import UnavailableError
from paceline.platform.telemetry.tracing import NOTHING, OFF, Span, Tracer
from paceline.platform.transport.linger import linger_s
from paceline.plugins import Engine, EngineOutput, EngineRequest, error_output
from paceline_rollout.probation import REFUSED, Probation

MAX_TIMEOUT_S = 86_400.0
MAX_ID_CHARS = 256
MIN_STALE_DEADLINES = 1024  # fewer are not worth compacting
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class CallerRequest:
    """A request as a caller made it."""

    generation: EngineRequest
    min_version: int = -1
    timeout_s: float = 0.0  # 0: as long as the stream lives
    trace: str = ""  # W3C traceparent


class CallerStream:
    """One caller: its open requests, and the outputs to send it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.open: set[str] = set()
        self._ready: list[EngineOutput] = []
        self._wake = asyncio.Event()
        self._half_closed = False

    def put(self, output: EngineOutput) -> None:
        """Queue an output for the caller."""
        self._ready.append(output)
        self._wake.set()

    def half_close(self) -> None:
        """Expect no more requests; the stream ends once all open ones are answered."""
        self._half_closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[EngineOutput]]:
        """Outputs since the last batch."""
        while self._ready or self.open or not self._half_closed:
            await self._wake.wait()
            await asyncio.sleep(linger_s(len(self.open)))
            self._wake.clear()
            if self._ready:
                batch, self._ready = self._ready, []
                yield batch


@dataclass(slots=True)
class _OpenRequest:
    stream: CallerStream
    name: str  # the caller's id of the request
    weight: int  # maximum number of tokens that the engine holds for it
    pinned_version: int
    deadline: float
    end: tuple[str, str] | None = None  # error code and detail to report when its abort completes
    span: Span = NOTHING
    first_ns: int = 0  # time of its first tokens
    version: int = -1  # of its newest tokens


class _Occupancy:
    """Number of open requests, integrated over time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self._request_s = 0.0
        self._since = 0.0

    def update(self, count: int) -> float:
        """Set the number of open requests; returns the request-seconds so far."""
        now = self._clock()
        self._request_s += self._count * (now - self._since)
        self._count, self._since = count, now
        return self._request_s


class StreamMultiplexer:
    """Sends each output of the engine to the stream of its request."""

    def __init__(
        self,
        *,
        engine: Engine,
        clock: Clock | None = None,
        tracer: Tracer = OFF,
        probation: Probation | None = None,
    ) -> None:
        """`probation`: who keeps tokens back until `accept` or `refuse`; nobody if None."""
        self._engine = engine
        self._probation = probation
        self._tracer = tracer
        self._clock: Clock = clock or time.monotonic
        self._open: dict[str, _OpenRequest] = {}
        self._occupancy = _Occupancy(self._clock)
        self._num_streams = 0
        self.num_ended = 0  # requests that have ended, however
        self._streams: set[CallerStream] = set()
        self._deadlines: list[tuple[float, str]] = []
        self._earlier_deadline = asyncio.Event()
        self._refusal = ""

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._open)

    def attach(self) -> CallerStream:
        """Open the stream of a new caller."""
        self._num_streams += 1
        stream = CallerStream(self._num_streams)
        self._streams.add(stream)
        return stream

    def detach(self, stream: CallerStream) -> None:
        """Drop a caller's stream and abort its requests."""
        names = [_engine_id(stream, name) for name in stream.open]
        self._streams.discard(stream)
        stream.open.clear()
        for name in names:
            if open_request := self._open.pop(name, None):
                open_request.span.end(error="the caller has disconnected")
        if names:
            self._occupancy.update(len(self._open))
            self._engine.abort(names)

    def submit(self, stream: CallerStream, requests: Sequence[CallerRequest]) -> None:
        """Submit the requests of one message; invalid ones end at once."""
        version = self._engine.status().version
        admitted: list[EngineRequest] = []
        for caller_request in requests:
            code, detail = self._refuse(stream, caller_request, version)
            if code:
                stream.put(error_output(caller_request.generation.request_id, code, detail))
            else:
                admitted.append(self._admit(stream, caller_request))
        if admitted:
            self._occupancy.update(len(self._open))
            self._engine.submit(admitted)

    def abort(self, stream: CallerStream, names: Sequence[str]) -> None:
        """Abort requests of a caller; unknown ones are ignored."""
        self._engine.abort([_engine_id(stream, name) for name in names if name in stream.open])

    def abort_all(self, code: str, detail: str) -> None:
        """End all open requests with an error; callers keep the tokens they have."""
        for open_request in self._open.values():
            open_request.end = open_request.end or (code, detail)
        self._engine.abort(list(self._open))

    def accept(self, version: int) -> None:
        """The engine has the weights of this version right: send its tokens."""
        for output in self._probation.accept(version) if self._probation is not None else ():
            if output.finish_reason is FinishReason.ERROR:
                self._engine.abort([output.request_id])
            self._send(output)

    def refuse(self, version: int) -> None:
        """The engine has this version wrong: end all open requests without the tokens of that."""
        self.abort_all("UNAVAILABLE", REFUSED)
        self._drop_held(version)

    def refuse_all(self, detail: str) -> None:
        """End all open requests, and refuse new ones, so that callers use another worker."""
        self._refusal = detail
        self.abort_all("UNAVAILABLE", detail)
        self._drop_held(self._engine.status().version)

    async def drain(self, detail: str) -> None:
        """`refuse_all`, and wait until callers have been sent all of their sampled tokens.

        The engine ends an aborted request with the tokens that it has not emitted yet.
        """
        self.refuse_all(detail)
        while self._open:
            await asyncio.sleep(0.01)
        while self._streams:
            for stream in self._streams:
                stream.half_close()
            await asyncio.sleep(0.01)

    def load(self) -> dict[str, float]:
        """Load for the roster: callers that share this worker and autoscaling read it.

        `open` excludes requests for a future version, which take no slot of the engine yet.
        `request_s` is the time that all requests so far have been open, summed.
        """
        version = self._engine.status().version
        now = [
            open_request
            for open_request in self._open.values()
            if open_request.pinned_version <= version
        ]
        return {
            "open": float(len(now)),
            "open_tokens": float(sum(open_request.weight for open_request in now)),
            "callers": float(sum(bool(stream.open) for stream in self._streams)),
            "request_s": self._occupancy.update(len(self._open)),
        }

    async def run(self) -> None:
        """Dispatch outputs and enforce deadlines until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._dispatch_outputs(), name="outputs")
            group.create_task(self._watch_deadlines(), name="deadlines")

    def _drop_held(self, version: int) -> None:
        """End requests whose tokens wait for a verdict, without these tokens."""
        for output in self._probation.refuse(version) if self._probation is not None else ():
            self._send(output)

    def _refuse(
        self, stream: CallerStream, caller_request: CallerRequest, version: int
    ) -> tuple[str, str]:
        name = caller_request.generation.request_id
        if self._refusal:
            return "UNAVAILABLE", self._refusal
        if problem := _problem(caller_request):
            return "INVALID_ARGUMENT", problem
        if name in stream.open:
            return "INVALID_ARGUMENT", f"request_id: {name!r} is already open on this stream"
        if caller_request.min_version > version:
            wanted = caller_request.min_version
            detail = f"min_version: {wanted} is not loaded yet; version {version} is active"
            return "FAILED_PRECONDITION", detail
        return "", ""

    def _admit(self, stream: CallerStream, caller_request: CallerRequest) -> EngineRequest:
        name = caller_request.generation.request_id
        engine_id = _engine_id(stream, name)
        stream.open.add(name)
        generation = caller_request.generation
        weight = len(generation.tokens) + generation.sampling.max_tokens
        deadline = (
            self._clock() + caller_request.timeout_s if caller_request.timeout_s > 0 else math.inf
        )
        open_request = _OpenRequest(stream, name, weight, generation.pinned_version, deadline)
        open_request.span = self._tracer.received(caller_request.trace).child(
            "rollout", kind="server"
        )
        self._open[engine_id] = open_request
        if deadline < math.inf:
            self._push_deadline(deadline, engine_id)
        return replace(generation, request_id=engine_id)

    def _push_deadline(self, deadline: float, engine_id: str) -> None:
        if not self._deadlines or deadline < self._deadlines[0][0]:
            self._earlier_deadline.set()
        heapq.heappush(self._deadlines, (deadline, engine_id))
        # Most requests end long before their deadline, so most of the heap becomes stale.
        if len(self._deadlines) > 2 * len(self._open) + MIN_STALE_DEADLINES:
            self._deadlines = [
                (open_request.deadline, n)
                for n, open_request in self._open.items()
                if open_request.deadline < math.inf
            ]
            heapq.heapify(self._deadlines)

    async def _dispatch_outputs(self) -> None:
        async for batch in self._engine.emissions():
            for output in batch:
                self._route(output)
        self._refusal = "the engine has stopped"
        for name in list(self._open):
            self._send(error_output(name, "UNAVAILABLE", self._refusal))
        raise UnavailableError(self._refusal)

    def _route(self, output: EngineOutput) -> None:
        if output.request_id not in self._open:
            return
        admitted = output if self._probation is None else self._probation.admit(output)
        if admitted is None:
            return
        if admitted is not output:  # it is cut short, but the engine goes on
            self._engine.abort([output.request_id])
        self._send(admitted)

    def _send(self, output: EngineOutput) -> None:
        open_request = self._open.get(output.request_id)
        if open_request is None:
            return
        if open_request.span:
            self._trace(open_request, output)
        reason, code, error = output.finish_reason, output.error_code, output.error
        if reason:
            del self._open[output.request_id]
            self._occupancy.update(len(self._open))
            self.num_ended += 1
            open_request.stream.open.discard(open_request.name)
            if reason is FinishReason.ABORT and open_request.end is not None:
                reason, (code, error) = FinishReason.ERROR, open_request.end
        open_request.stream.put(
            EngineOutput(
                request_id=open_request.name,
                tokens=output.tokens,
                logprobs=output.logprobs,
                versions=output.versions,
                finish_reason=reason,
                matched_stop=output.matched_stop,
                error_code=code,
                error=error,
            )
        )

    def _trace(self, open_request: _OpenRequest, output: EngineOutput) -> None:
        """Add an output to the span of its request."""
        span, now = open_request.span, self._tracer.now()
        if output.tokens:
            open_request.first_ns = open_request.first_ns or now
        for run in output.versions:
            if 0 <= open_request.version < run.version:
                span.event("swap", version=run.version)
            open_request.version = run.version
        if output.finish_reason:
            _stages(span, output, open_request.first_ns or now)
            reason = output.finish_reason
            span.set(version=open_request.version, **{"gen_ai.response.finish_reasons": [reason]})
            span.end(error=output.error_code)

    async def _watch_deadlines(self) -> None:
        while True:
            self._earlier_deadline.clear()
            wait_s = self._deadlines[0][0] - self._clock() if self._deadlines else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._earlier_deadline.wait()
            except TimeoutError:
                self._expire()

    def _expire(self) -> None:
        expired: list[str] = []
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            open_request = self._open.get(name)
            # An id may have been reused since, with another deadline.
            if (
                open_request is not None
                and open_request.deadline <= now
                and open_request.end is None
            ):
                open_request.end = ("DEADLINE_EXCEEDED", "timeout_s: has passed")
                expired.append(name)
        if expired:
            self._engine.abort(expired)


def _stages(span: Span, end: EngineOutput, first_ns: int) -> None:
    """Add spans for queue, prefill and decode.

    For an engine that does not report these times, decode begins with the first tokens.
    """
    started, joined = span.start_ns, first_ns
    if end.queue_s >= 0:
        started = span.start_ns + round(end.queue_s * 1e9)
        joined = started + round(end.prefill_s * 1e9)
        span.past("queue", span.start_ns, started)
    span.past("prefill", started, joined, queue_reported=end.queue_s >= 0)
    span.past("decode", joined)


def _problem(caller_request: CallerRequest) -> str:
    """The problem of a request: field, value and what is allowed; empty if it is valid."""
    name, pinned = caller_request.generation.request_id, caller_request.generation.pinned_version
    min_version = caller_request.min_version
    if not name:
        return f"request_id: is empty; allowed: 1 to {MAX_ID_CHARS} characters"
    if len(name) > MAX_ID_CHARS:
        return f"request_id: {len(name)} characters; allowed: at most {MAX_ID_CHARS}"
    # Written so that a NaN is refused.
    if not 0 <= caller_request.timeout_s <= MAX_TIMEOUT_S:
        return f"timeout_s: {caller_request.timeout_s}; allowed: 0 to {MAX_TIMEOUT_S:g}"
    if min_version < -1:
        return f"min_version: {min_version}; allowed: -1 or a version"
    if 0 <= pinned < min_version:
        return (
            f"pinned_version: {pinned} is below min_version {min_version}; allowed: at least that"
        )
    return ""


def _engine_id(stream: CallerStream, name: str) -> str:
    """The engine's id of a request; two callers may use the same name."""
    return f"{stream.number}/{name}"
