from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from grpc import aio

from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF, Span, Tracer
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor, connect, exchange
from paceline.plugins import EngineRequest
from paceline.types import PolicyVersion, SamplingParams
from paceline.v1 import rollout_pb2, types_pb2
from paceline.v1 import rollout_pb2 as pb
from paceline.v1.rollout_pb2_grpc import RolloutStub, add_RolloutServicer_to_server
from paceline.weights.canary import Canary, CanarySequence
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import FakeClock
from paceline_rollout.engines.simulated import SimulatedEngine
from paceline_rollout.servicer import RolloutServicer
from paceline_rollout.streams import CallerRequest, StreamMultiplexer

if TYPE_CHECKING:
    from paceline.v1.rollout_pb2_grpc import RolloutAsyncStub


class Header:
    version = 5
    tied = ()
    canary = Canary((CanarySequence((1, 2), (-1.0,)),))


class Snapshot:
    header = Header()


def request(name: str, tokens: tuple[int, ...] = (1, 2), **fields: Any) -> pb.GenerateRequest:
    knobs: dict[str, Any] = {
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        **fields.pop("sampling", {}),
    }
    known: dict[str, Any] = {"pinned_version": -1, "min_version": -1, "timeout_s": 100.0}
    sampling = types_pb2.SamplingParams(**knobs)
    return pb.GenerateRequest(
        request_id=name, tokens=tokens, sampling=sampling, **{**known, **fields}
    )


class Caller:
    """One stream."""

    def __init__(self, stub: RolloutAsyncStub) -> None:
        self._outgoing: asyncio.Queue[pb.GenerateBatch | None] = asyncio.Queue()
        self._replies = aiter(exchange(stub.Generate, self._sent(), timeout_s=PATIENCE_S))
        self.events: list[pb.GenerateEvent] = []
        self.messages = 0

    async def _sent(self) -> AsyncIterator[pb.GenerateBatch]:
        while (batch := await self._outgoing.get()) is not None:
            yield batch

    def send(self, *requests: pb.GenerateRequest, abort: tuple[str, ...] = ()) -> None:
        self._outgoing.put_nowait(pb.GenerateBatch(requests=requests, abort=abort))

    def half_close(self) -> None:
        self._outgoing.put_nowait(None)

    async def read(self) -> bool:
        message = await anext(self._replies, None)
        self.messages += message is not None
        self.events.extend(message.events if message is not None else ())
        return message is not None

    async def ends(self, num: int) -> dict[str, pb.GenerateEvent]:
        while len(found := [e for e in self.events if e.finish_reason]) < num:
            assert await self.read()
        return {e.request_id: e for e in found}


class Service:
    def __init__(
        self, engine: SimulatedEngine, multiplexer: StreamMultiplexer, stub: RolloutAsyncStub
    ) -> None:
        self.engine = engine
        self.multiplexer = multiplexer
        self.stub = stub

    def call(self) -> Caller:
        return Caller(self.stub)


@asynccontextmanager
async def serve(
    *, clock: Callable[[], float] = time.monotonic, tracer: Tracer = OFF, **options: Any
) -> AsyncGenerator[Service]:
    engine = SimulatedEngine(
        model_dir=None,
        dtype="float32",
        max_context=64,
        max_concurrent=1000,
        threads=1,
        tokenizer_dir=None,
        job_id="job",
        vocab_size=32,
        tick_s=0.002,
        clock=clock,
        **options,
    )
    await engine.start()
    await engine.load(Snapshot(), "in_flight")
    multiplexer = StreamMultiplexer(engine=engine, clock=clock, tracer=tracer)
    passing = asyncio.create_task(multiplexer.run())
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())], options=SERVER_OPTIONS)
    servicer = RolloutServicer(
        multiplexer=multiplexer,
        worker_id="w",
        status=lambda: (engine.status(), PolicyVersion(5, 5), 0.25),
    )
    add_RolloutServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}")
    try:
        yield Service(engine, multiplexer, RolloutStub(channel))
    finally:
        await channel.close()
        await server.stop(0)
        passing.cancel()
        await asyncio.wait({passing})
        await engine.close()


FAST: dict[str, Any] = {"decode_tokens_per_s": 2000.0}
LONG: dict[str, Any] = {"decode_tokens_per_s": 100.0, "length": {"mean": 1000.0}}


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not done():
            await asyncio.sleep(0.01)


async def decoded(service: Service, clock: FakeClock, seconds: float, *, prompts: int) -> None:
    """All requests, of so many tokens of prompts, have been decoded for so long."""

    def prefilled() -> bool:
        clock.pass_s(0.0001)
        return service.engine.status().prompt_tokens == prompts

    await until(prefilled)
    before_s = service.engine.status().busy_s
    clock.pass_s(seconds)
    await until(lambda: service.engine.status().busy_s > before_s + seconds / 2)


async def test_many_requests_share_messages_and_half_close_ends_the_stream():
    async with serve(**FAST) as service:
        caller = service.call()
        caller.send(*(request(str(i), sampling={"seed": i}) for i in range(200)))
        caller.half_close()
        ends = await caller.ends(200)
        assert not await caller.read()
        assert len(ends) == 200
        assert caller.messages < 50
        assert all(e.finish_reason == rollout_pb2.FINISH_REASON_LENGTH for e in ends.values())
        assert all(len(e.tokens) == len(e.logprobs) for e in caller.events)
        assert all([(v.version, v.count) for v in e.versions] == [(5, 4)] for e in ends.values())


async def test_streams_get_their_own_answers_even_with_equal_names():
    async with serve(**FAST) as service:
        one, two = service.call(), service.call()
        one.send(request("a", (1,), sampling={"seed": 1}))
        two.send(request("a", (1,), sampling={"seed": 2}))
        first, second = (await one.ends(1))["a"], (await two.ends(1))["a"]
        assert list(first.tokens) != list(second.tokens)


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [
        (request("x", ()), "INVALID_ARGUMENT", "tokens: is empty"),
        (request("x", (32,)), "INVALID_ARGUMENT", "id 32 is not in the vocabulary"),
        (request("x", (1,) * 64), "INVALID_ARGUMENT", "allowed: fewer than 64"),
        (request("x", sampling={"top_p": 0}), "INVALID_ARGUMENT", "sampling.top_p: 0.0"),
        (request("x", sampling={"temperature": -3}), "INVALID_ARGUMENT", "temperature: -3.0"),
        (request("x", timeout_s=-1), "INVALID_ARGUMENT", "timeout_s: -1.0"),
        (request("x", timeout_s=float("nan")), "INVALID_ARGUMENT", "timeout_s: nan"),
        (request(""), "INVALID_ARGUMENT", "request_id: is empty"),
        (request("x", min_version=6), "FAILED_PRECONDITION", "version 5 is active"),
        (request("x", pinned_version=4), "FAILED_PRECONDITION", "pinned_version: 4 is gone"),
    ],
)
async def test_bad_requests_fail_alone(bad: pb.GenerateRequest, code: str, text: str):
    async with serve(**FAST) as service:
        caller = service.call()
        caller.send(bad, request("good"))
        ends = await caller.ends(2)
        assert ends["good"].finish_reason == rollout_pb2.FINISH_REASON_LENGTH
        end = ends[bad.request_id]
        assert (end.finish_reason, end.error_code) == (rollout_pb2.FINISH_REASON_ERROR, code)
        assert text in end.error


async def test_a_name_that_is_open_is_refused():
    async with serve(clock=FakeClock(), **LONG) as service:
        caller = service.call()
        caller.send(request("a"), request("a"))
        end = (await caller.ends(1))["a"]
        assert "request_id: 'a' is already open" in end.error


async def test_deadline_aborts_and_keeps_tokens():
    clock = FakeClock()
    async with serve(clock=clock, **LONG) as service:
        caller = service.call()
        caller.send(request("a", timeout_s=0.3, sampling={"max_tokens": 50}), request("b"))
        reading = asyncio.create_task(caller.ends(2))
        await decoded(service, clock, 0.2, prompts=4)
        clock.pass_s(0.2)
        ends = await reading
        assert ends["a"].error_code == "DEADLINE_EXCEEDED"
        assert sum(len(e.tokens) for e in caller.events if e.request_id == "a") >= 1
        assert ends["b"].finish_reason == rollout_pb2.FINISH_REASON_LENGTH


async def test_abort_over_the_wire():
    async with serve(clock=FakeClock(), **LONG) as service:
        caller = service.call()
        caller.send(request("a", sampling={"max_tokens": 50}))
        caller.send(abort=("a", "unknown"))
        assert (await caller.ends(1))["a"].finish_reason == rollout_pb2.FINISH_REASON_ABORT


async def test_a_closed_stream_aborts_its_requests():
    async with serve(clock=FakeClock(), **LONG) as service:
        channel_call = service.stub.Generate()
        await channel_call.write(pb.GenerateBatch(requests=[request("a")]))
        await until(lambda: bool(service.multiplexer.num_open))
        channel_call.cancel()
        await until(
            lambda: not service.multiplexer.num_open and not service.engine.status().running
        )


async def test_a_draining_worker_hands_requests_back():
    async with serve(clock=FakeClock(), **LONG) as service:
        caller = service.call()
        caller.send(request("a", sampling={"max_tokens": 50}))
        reading = asyncio.create_task(caller.ends(2))
        await until(lambda: bool(service.multiplexer.num_open))
        service.multiplexer.refuse_all("draining")
        caller.send(request("b"))
        ends = await reading
        assert {e.error_code for e in ends.values()} == {"UNAVAILABLE"}


async def test_a_drained_worker_has_sent_all_that_it_sampled():
    """Also what the engine had not emitted; then its streams end."""
    clock = FakeClock()
    async with serve(clock=clock, **LONG, flush_s=60.0) as service:
        caller = service.call()
        caller.send(*(request(name, sampling={"max_tokens": 50}) for name in "ab"))
        reading = asyncio.create_task(caller.ends(2))
        await decoded(service, clock, 0.2, prompts=4)
        load = service.multiplexer.load()
        waited_s = load.pop("request_s")
        assert load == {"open": 2, "open_tokens": 104, "callers": 1}
        assert waited_s > 2 * 0.15
        clock.pass_s(0.1)
        async with asyncio.timeout(PATIENCE_S):
            await service.multiplexer.drain("draining")
            ends = await reading
            assert not await caller.read()
        assert {e.error_code for e in ends.values()} == {"UNAVAILABLE"}
        assert all(len(e.tokens) > 5 for e in ends.values())
        sampled = service.engine.status().tokens_generated
        assert sum(len(e.tokens) for e in caller.events) == sampled
        load = service.multiplexer.load()
        total_s = load.pop("request_s")
        assert total_s == pytest.approx(waited_s + 2 * 0.1)
        assert load == {"open": 0, "open_tokens": 0, "callers": 0}
        clock.pass_s(1.0)
        assert service.multiplexer.load()["request_s"] == pytest.approx(total_s)


async def test_callers_of_a_stopping_engine_get_a_retriable_error():
    async with serve(clock=FakeClock(), **LONG) as service:
        caller = service.call()
        caller.send(request("a", sampling={"max_tokens": 50}))
        reading = asyncio.create_task(caller.ends(1))
        await until(lambda: bool(service.multiplexer.num_open))
        async with asyncio.timeout(PATIENCE_S):
            await service.engine.close()
            await reading
            caller.send(request("b"))
            ends = await caller.ends(2)
        assert ends["b"].error_code == "UNAVAILABLE"


async def test_status():
    async with serve() as service:
        status = await service.stub.Status(pb.RolloutStatusRequest(), timeout=PATIENCE_S)
        assert (status.worker_id, status.engine, status.active.version) == ("w", "simulated", 5)
        assert (status.max_context, status.canary_error) == (64, 0.25)


TRACE = "00-0000000000000000000000000000000a-000000000000000b-01"


async def test_a_sampled_request_records_what_it_waited_for():
    spans: list[Span] = []
    async with serve(tracer=Tracer(take=spans.append, share=1.0), **FAST) as service:
        caller = service.call()
        caller.send(request("a", trace=TRACE), request("b"))
        await caller.ends(2)
    queue, prefill, decode, rollout = spans
    names = [span.name for span in spans]
    assert names == ["queue", "prefill", "decode", "rollout"]
    assert rollout.parent == (0xA, 0xB)
    assert all(span.parent == rollout.context for span in (queue, prefill, decode))
    assert queue.start_ns == rollout.start_ns
    assert (queue.end_ns, prefill.end_ns) == (prefill.start_ns, decode.start_ns)
    assert decode.end_ns <= rollout.end_ns
    assert rollout.attributes["version"] == 5
    assert rollout.attributes["gen_ai.response.finish_reasons"] == ["length"]


async def test_a_swap_under_a_request_is_an_event_of_it():
    class Newer(Snapshot):
        header = type("Newer", (Header,), {"version": 6})()

    spans: list[Span] = []
    tracer = Tracer(take=spans.append, share=1.0)
    clock = FakeClock()
    async with serve(clock=clock, tracer=tracer, **LONG) as service:
        caller = service.call()
        caller.send(request("a", trace=TRACE, sampling={"max_tokens": 40}))
        reading = asyncio.create_task(caller.read())
        await decoded(service, clock, 0.3, prompts=2)  # more than it takes to flush
        assert await reading
        await service.engine.load(Newer(), "in_flight")
        clock.pass_s(1.0)
        await caller.ends(1)
    rollout = spans[-1]
    assert [(name, more) for name, _, more in rollout.events] == [("swap", {"version": 6})]
    assert rollout.attributes["version"] == 6


async def test_a_refusal_and_a_caller_that_is_gone_end_their_spans():
    spans: list[Span] = []
    tracer = Tracer(take=spans.append, share=1.0)
    async with serve(clock=FakeClock(), tracer=tracer, **LONG) as service:
        caller = service.call()
        caller.send(request("long", trace=TRACE, sampling={"max_tokens": 60}))
        caller.send(request("bad", trace=TRACE, tokens=(99,)))
        await caller.ends(1)
        stream = service.multiplexer.attach()
        ask = CallerRequest(
            EngineRequest("mine", (1, 2), SamplingParams(max_tokens=60)), trace=TRACE
        )
        service.multiplexer.submit(stream, [ask])
        service.multiplexer.detach(stream)
    errors = [span.error for span in spans if span.name == "rollout"]
    assert errors[:2] == ["INVALID_ARGUMENT", "the caller has disconnected"]
