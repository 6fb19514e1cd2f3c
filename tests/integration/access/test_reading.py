"""Deliberately slow gRPC calls, whose message does not arrive or which never end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from grpc import StatusCode, aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline.v1 import jobs_pb2 as pb
from paceline_gateway.access.authentication import MAX_OPEN
from paceline_gateway.access.guard import MAX_LARGE_CALLS, MAX_READS
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Site
else:
    Site = Any

ABSENT = pb.GetJobRequest(job_id="nope").SerializeToString()


def metadata(site: Site, who: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer {site.tokens[who]}"),)


@asynccontextmanager
async def silent(site: Site, who: str, method: str, number: int) -> AsyncGenerator[None]:
    """Open calls that send nothing."""
    async with aio.insecure_channel(site.grpc) as channel:
        begin: Any = channel.stream_unary(f"/paceline.v1.Jobs/{method}")
        calls = [begin(metadata=metadata(site, who)) for _ in range(number)]
        for each in calls:
            await each.wait_for_connection()
        await asyncio.sleep(0.5)
        yield
        for each in calls:
            each.cancel()


async def told(site: Site, who: str, method: str = "GetJob", *, timeout: float) -> StatusCode:
    async with aio.insecure_channel(site.grpc) as channel:
        call: Any = channel.unary_unary(f"/paceline.v1.Jobs/{method}")
        try:
            await call(ABSENT, timeout=timeout, metadata=metadata(site, who))
        except aio.AioRpcError as error:
            return error.code()
    return StatusCode.OK


async def answered_again(peopled: Site, who: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await told(peopled, who, timeout=5) is not StatusCode.NOT_FOUND:
            pass


async def test_calls_count_before_their_message_arrives(peopled: Site) -> None:
    async with silent(peopled, "read-a", "GetJob", MAX_OPEN), asyncio.timeout(PATIENCE_S):
        while await told(peopled, "read-a", timeout=1) is not StatusCode.RESOURCE_EXHAUSTED:
            pass
        assert await told(peopled, "read-b", timeout=PATIENCE_S) is StatusCode.NOT_FOUND
    await answered_again(peopled, "read-a")


async def test_a_few_messages_of_a_tenant_arrive_at_a_time(peopled: Site) -> None:
    assert await told(peopled, "admin-a", timeout=PATIENCE_S) is StatusCode.NOT_FOUND
    async with silent(peopled, "read-a", "GetJob", MAX_READS):
        assert await told(peopled, "admin-a", timeout=3) is StatusCode.DEADLINE_EXCEEDED
        assert await told(peopled, "read-b", timeout=PATIENCE_S) is StatusCode.NOT_FOUND
    await answered_again(peopled, "admin-a")


async def test_large_messages_have_places_of_their_own(peopled: Site) -> None:
    assert await told(peopled, "admin-a", timeout=PATIENCE_S) is StatusCode.NOT_FOUND
    async with silent(peopled, "submit-a", "SubmitJob", MAX_LARGE_CALLS):
        code = await told(peopled, "admin-a", "SubmitJob", timeout=3)
        assert code is StatusCode.DEADLINE_EXCEEDED
        assert await told(peopled, "submit-a", timeout=PATIENCE_S) is StatusCode.NOT_FOUND
        code = await told(peopled, "submit-b", "SubmitJob", timeout=PATIENCE_S)
        assert code is StatusCode.INVALID_ARGUMENT


async def test_unauthenticated_callers_can_check_but_not_watch_health(peopled: Site) -> None:
    async with aio.insecure_channel(peopled.grpc) as channel:
        stub: Any = HealthStub(channel)
        told = await stub.Check(HealthCheckRequest(), timeout=PATIENCE_S)
        assert told.status == HealthCheckResponse.SERVING
        for given in ((), metadata(peopled, "all")):
            watch = stub.Watch(HealthCheckRequest(), timeout=PATIENCE_S, metadata=given)
            assert await watch.code() is StatusCode.PERMISSION_DENIED
