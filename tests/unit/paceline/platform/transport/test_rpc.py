import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc import aio

from paceline.errors import (
    DeadlineError,
    FencedError,
    NotFoundError,
    PacelineError,
    QuotaError,
    UnavailableError,
    every_class,
)
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport import rpc
from paceline.v1 import reward_pb2 as pb
from paceline.v1 import reward_pb2_grpc as pb_grpc
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from paceline.v1.reward_pb2_grpc import RewardAsyncStub


WAIT_S = PATIENCE_S


class Flaky(pb_grpc.RewardServicer):
    """Raises a given error in the first `times` calls."""

    def __init__(self, error: Exception | None, times: int = 10**9) -> None:
        self.error = error
        self.times = times
        self.calls = 0
        self.given: list[str | None] = []

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreReply:
        self.calls += 1
        self.given.append(dict(context.invocation_metadata()).get("authorization"))
        if self.error is not None and self.calls <= self.times:
            raise self.error
        return pb.ScoreReply()


@asynccontextmanager
async def served(servicer: Flaky, *, port: int = 0) -> AsyncGenerator[str]:
    interceptor = rpc.ErrorInterceptor(metrics=Metrics())
    server = aio.server(interceptors=[interceptor])
    pb_grpc.add_RewardServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_message_that_cannot_be_read_is_refused() -> None:
    async with served(Flaky(None)) as address, rpc.connect(address) as channel:
        call: Any = channel.unary_unary("/paceline.v1.Reward/Score")
        for data in (b"\x0a\x7f", b"\xff" * 10):
            with pytest.raises(aio.AioRpcError) as caught:
                await call(data, timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "paceline.v1.ScoreRequest" in str(caught.value.details())
        assert await call(b"", timeout=WAIT_S) == b""


async def score(address: str, *, idempotent: bool = False, token: str = "") -> pb.ScoreReply:
    async with rpc.connect(address, token=token) as channel:
        stub: RewardAsyncStub = pb_grpc.RewardStub(channel)
        return await rpc.call(
            stub.Score, pb.ScoreRequest(), timeout_s=WAIT_S, idempotent=idempotent
        )


@pytest.mark.parametrize("cls", every_class())
async def test_every_error_arrives_as_itself(cls: type[PacelineError]) -> None:
    async with served(Flaky(cls("what to do"))) as address:
        with pytest.raises(PacelineError) as caught:
            await score(address)
        assert type(caught.value) is cls
        assert str(caught.value) == "what to do"


async def test_an_unexpected_error_reveals_no_details() -> None:
    async with served(Flaky(KeyError("secret"))) as address:
        with pytest.raises(PacelineError, match="see the log") as caught:
            await score(address)
        assert "secret" not in str(caught.value)


async def test_only_idempotent_calls_are_retried() -> None:
    flaky = Flaky(UnavailableError("away"), times=2)
    async with served(flaky) as address:
        with pytest.raises(UnavailableError):
            await score(address)
        await score(address, idempotent=True)
        assert flaky.calls == 3


async def test_a_call_is_not_retried_without_time_for_an_answer() -> None:
    given: list[float] = []

    async def away(request: Any, /, *, timeout: float | None = None, metadata: Any = None) -> Any:
        given.append(timeout or 0.0)
        await asyncio.sleep(given[0] - 0.06)
        nothing = aio.Metadata()
        raise aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="away")

    with pytest.raises(UnavailableError, match="away"):
        await rpc.call(away, pb.ScoreRequest(), timeout_s=0.5, idempotent=True)
    assert len(given) == 1


@pytest.mark.parametrize("cls", [FencedError, QuotaError])
async def test_a_refusal_is_not_retried(cls: type[PacelineError]) -> None:
    flaky = Flaky(cls("no"))
    async with served(flaky) as address:
        with pytest.raises(cls):
            await score(address, idempotent=True)
        assert flaky.calls == 1


async def test_an_absent_server_is_unavailable_within_the_deadline() -> None:
    async with rpc.connect("127.0.0.1:1") as channel:
        stub: RewardAsyncStub = pb_grpc.RewardStub(channel)
        with pytest.raises((UnavailableError, DeadlineError)):
            await rpc.call(stub.Score, pb.ScoreRequest(), timeout_s=0.5, idempotent=True)


async def test_a_new_channel_does_not_wait_for_the_backoff_of_others_to_its_address() -> None:
    async with served(Flaky(None)) as address:
        pass
    async with rpc.connect(address) as before:
        for _ in range(20):
            with pytest.raises(UnavailableError):
                await rpc.call(
                    pb_grpc.RewardStub(before).Score, pb.ScoreRequest(), timeout_s=WAIT_S
                )
        port = int(address.rpartition(":")[2])
        async with served(Flaky(None), port=port), rpc.connect(address) as after:
            stub = pb_grpc.RewardStub(after)
            await rpc.call(stub.Score, pb.ScoreRequest(), timeout_s=WAIT_S)


async def test_a_token_is_sent_with_every_call() -> None:
    servicer = Flaky(None)
    async with served(servicer) as address:
        await score(address)
        await score(address, token="mine")
    assert servicer.given == [None, "Bearer mine"]


def test_foreign_statuses_map_to_the_nearest_class() -> None:
    error = aio.AioRpcError(grpc.StatusCode.NOT_FOUND, aio.Metadata(), aio.Metadata(), "gone")
    assert type(rpc.translate(error)) is NotFoundError


def test_back_off_grows_to_its_bound() -> None:
    pauses = [rpc.backoff_s(n, rng=lambda: 1.0) for n in range(12)]
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(0.05)
    assert pauses[-1] == pytest.approx(2.0)
