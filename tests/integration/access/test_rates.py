"""Callers without a valid token and tokens that call too often have to wait: REST and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc import aio

from paceline.platform.transport.principal import new_token
from paceline.v1 import jobs_pb2 as pb
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Site
else:
    Site = Any

SLOW = 1e-6  # a second: nothing comes back during a test
Ask = Callable[[str], Awaitable[str]]
"""Asks for the jobs with a token; returns the status."""


async def over_rest(site: Site, token: str) -> str:
    async with httpx.AsyncClient(base_url=site.url, timeout=PATIENCE_S) as http:
        reply = await http.get("/v1/jobs", headers={"authorization": f"Bearer {token}"})
    if reply.status_code == 429:
        assert int(reply.headers["retry-after"]) > 1
        assert reply.json()["error"]["type"] == "RateError"
    return {200: "OK", 401: "UNAUTHENTICATED", 429: "RESOURCE_EXHAUSTED"}[reply.status_code]


async def over_grpc(site: Site, token: str) -> str:
    async with aio.insecure_channel(site.grpc) as channel:
        stub: Any = JobsStub(channel)
        try:
            metadata = (("authorization", f"Bearer {token}"),)
            await stub.ListJobs(pb.ListJobsRequest(), timeout=PATIENCE_S, metadata=metadata)
        except aio.AioRpcError as error:
            code: grpc.StatusCode = error.code()
            return code.name
    return "OK"


@pytest.fixture(params=[over_rest, over_grpc])
def ask(request: pytest.FixtureRequest, site: Site) -> Ask:
    return lambda token: request.param(site, token)


async def refused(site: Site, reason: str) -> int:
    """How many refusals of a kind the audit log has, once it has some."""
    async with site.client() as client, asyncio.timeout(PATIENCE_S):
        while True:
            entries = (await client.list_audit(page_size=1000)).entries
            if counts := [each.count for each in entries if each.detail == reason]:
                return sum(counts)
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("limits", [{"access": {"failed_per_s": SLOW, "failed_burst": 3}}])
async def test_after_some_tokens_in_vain_an_address_has_to_wait(site: Site, ask: Ask) -> None:
    known = await site.make("known", role="read", tenant="a")
    new = await site.make("new", role="read", tenant="a")
    assert await ask(known) == "OK"
    tried = [new_token()[1], "malformed", "pl_of_nobody", new_token()[1]]
    assert [await ask(token) for token in tried] == [
        *["UNAUTHENTICATED"] * 3,
        "RESOURCE_EXHAUSTED",
    ]
    # Whoever is known goes on, from the same address too; so does the installation itself.
    assert await ask(known) == await ask(site.bootstrap) == "OK"
    assert await ask(new) == "RESOURCE_EXHAUSTED"  # it looks like one more guess
    assert await refused(site, "attempts") >= 1


@pytest.mark.parametrize("limits", [{"access": {"calls_per_s": SLOW, "calls_burst": 3}}])
async def test_a_token_that_calls_too_often_has_to_wait(site: Site, ask: Ask) -> None:
    busy = await site.make("busy", role="read", tenant="a")
    other = await site.make("other", role="read", tenant="a")
    assert [await ask(busy) for _ in range(4)] == [*["OK"] * 3, "RESOURCE_EXHAUSTED"]
    assert await ask(other) == "OK"
    assert [await ask(site.bootstrap) for _ in range(5)] == ["OK"] * 5
    assert await refused(site, "calls") >= 1
