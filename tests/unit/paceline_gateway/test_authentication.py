"""What the gateway remembers of tokens, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from grpc import aio

from paceline.errors import AuthenticationError, PacelineError, StoreError, UnavailableError
from paceline.platform import wire
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.principal import (
    Principal,
    Role,
    derived_token,
    new_token,
    token_id_of,
)
from paceline.platform.transport.rpc import ErrorInterceptor, connect
from paceline.v1 import access_pb2 as pb
from paceline.v1 import access_pb2_grpc
from paceline.v1.access_pb2_grpc import AuthenticationStub
from paceline_gateway.access.authentication import FRESH_S, OUTAGE_S, Authenticator
from paceline_gateway.access.bootstrap import own_tokens
from paceline_gateway.access.guard import host_of
from paceline_gateway.access.refusals import MAX_REFUSALS, Refusal, Refusals
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import AuthenticationAsyncStub

BOOTSTRAP = "pl_bootstrap_of_these_tests"


class Authentication(access_pb2_grpc.AuthenticationServicer):
    """Knows one tenant's tokens; counts what it is asked."""

    def __init__(self) -> None:
        self.error: PacelineError | None = None
        self.asked = 0
        self.expires_in_s: float | None = None
        self.reported: list[pb.Refusal] = []

    async def Authenticate(self, request: Any, context: Any) -> pb.AuthenticateReply:
        self.asked += 1
        if self.error is not None:
            raise self.error
        who = Principal(request.token_id, "ann", "a", Role.READ)
        return pb.AuthenticateReply(
            principal=wire.to_proto(who, pb.Principal), expires_in_s=self.expires_in_s
        )

    async def ReportRefusals(self, request: Any, context: Any) -> pb.ReportRefusalsReply:
        if self.error is not None:
            raise self.error
        self.reported += request.refusals
        return pb.ReportRefusalsReply()


class World:
    """A authenticator, who it asks, and a clock that stands still until told."""

    def __init__(
        self, keeper: Authentication, stub: AuthenticationAsyncStub, *, timeout_s: float = 60.0
    ) -> None:
        self.keeper, self.keeper_stub = keeper, stub
        self.now = 100.0
        self.refusals = Refusals(authentication=stub, metrics=Metrics())
        self.authenticator = Authenticator(
            authentication=stub,
            refusals=self.refusals,
            own=own_tokens(BOOTSTRAP),
            timeout_s=timeout_s,
            max_cached=2,
            clock=lambda: self.now,
        )

    async def enter(self, token: str, role: Role = Role.READ) -> Principal:
        return await self.authenticator.authorize(f"Bearer {token}", role, source="h", action="x")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    keeper = Authentication()
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())])
    access_pb2_grpc.add_AuthenticationServicer_to_server(keeper, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield World(keeper, AuthenticationStub(channel))
    await server.stop(0)


async def test_a_token_is_verified_again_after_some_seconds(world: World) -> None:
    _, token = new_token()
    who = await world.enter(token)
    for _ in range(2):
        assert await world.enter(token) == who
    assert (who.token_id, who.source, world.keeper.asked) == (token_id_of(token), "h", 1)
    world.now += FRESH_S
    await world.enter(token)
    assert world.keeper.asked == 2
    world.keeper.error = AuthenticationError("no")
    world.now += FRESH_S
    for _ in range(2):
        with pytest.raises(AuthenticationError, match="a valid API token is needed"):
            await world.enter(token)
    assert world.keeper.asked == 4
    with pytest.raises(AuthenticationError, match="none was sent"):
        await world.authenticator.authorize("", Role.READ, source="h", action="x")


async def entered(world: World, token: str) -> bool:
    with suppress(UnavailableError):
        await world.enter(token)
        return True
    return False


async def test_in_an_outage_known_tokens_stay_valid_for_a_while(world: World) -> None:
    (_, known), (_, other) = new_token(), new_token()
    # Every call in the outage lasts so long; one before it may last longer.
    world = World(world.keeper, world.keeper_stub, timeout_s=0.5)
    async with asyncio.timeout(PATIENCE_S):
        while not await entered(world, known):
            pass
    world.keeper.error = StoreError("gone")
    world.now += OUTAGE_S - FRESH_S
    assert (await world.enter(known)).name == "ann"
    asked = world.keeper.asked
    await world.enter(known)
    assert world.keeper.asked == asked  # not every call waits for the outage
    with pytest.raises(UnavailableError):
        await world.enter(other)
    assert (await world.enter(BOOTSTRAP)).name == "bootstrap"
    world.now += FRESH_S
    with pytest.raises(UnavailableError):
        await world.enter(known)


async def test_a_call_late_in_an_outage_does_not_prolong_what_is_accepted(world: World) -> None:
    _, token = new_token()
    world = World(world.keeper, world.keeper_stub, timeout_s=0.5)
    async with asyncio.timeout(PATIENCE_S):
        while not await entered(world, token):
            pass
    world.keeper.error = StoreError("gone")
    world.now += OUTAGE_S - FRESH_S / 2
    assert await entered(world, token)
    world.now += FRESH_S / 2
    assert not await entered(world, token)


async def test_a_cached_token_expires_with_the_token(world: World) -> None:
    world.keeper.expires_in_s = 1.0
    _, token = new_token()
    await world.enter(token)
    world.now += 1.0
    world.keeper.error = AuthenticationError("expired")
    with pytest.raises(AuthenticationError):
        await world.enter(token)


async def test_malformed_tokens_are_not_looked_up(world: World) -> None:
    for token in ("", "x", BOOTSTRAP[:-1], derived_token("other", "controller")):
        with pytest.raises(AuthenticationError):
            await world.enter(token)
    assert world.keeper.asked == 0
    assert (await world.enter(derived_token(BOOTSTRAP, "controller"))).role is Role.SUBMIT


async def test_no_token_is_never_one_of_the_own(world: World) -> None:
    world.authenticator = Authenticator(
        authentication=world.keeper_stub, refusals=world.refusals, own=own_tokens("")
    )
    for authorization in ("", "Bearer ", "Bearer", "Basic eDp5"):
        with pytest.raises(AuthenticationError):
            await world.authenticator.authorize(authorization, Role.READ, source="h", action="x")


async def test_the_token_cache_is_bounded(world: World) -> None:
    tokens = [new_token()[1] for _ in range(3)]
    for token in (*tokens, tokens[2], tokens[0]):
        await world.enter(token)
    assert world.keeper.asked == 4


async def test_refusals_wait_for_an_outage_to_end_and_are_bounded(world: World) -> None:
    world.keeper.error = StoreError("gone")
    for number in range(MAX_REFUSALS + 50):
        world.refusals.note(Refusal(None, f"10.0.0.{number}", "x", "invalid"))
    await world.refusals.flush()
    world.keeper.error = None
    await world.refusals.flush()
    assert sum(each.count for each in world.keeper.reported) == MAX_REFUSALS + 50
    assert len(world.keeper.reported) == MAX_REFUSALS + 1
    await world.refusals.flush()
    assert len(world.keeper.reported) == MAX_REFUSALS + 1


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:5", "10.0.0.1"), ("ipv6:%5B::1%5D:5", "::1"), ("unix:/tmp/s", "unix")],
)
def test_the_host_of_a_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host
