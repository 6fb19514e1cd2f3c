"""How often tokens may be tried and used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.limits import AccessLimits
from paceline.errors import AuthenticationError, RateError
from paceline.platform import wire
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.principal import Principal, Role, new_token, token_digest
from paceline.platform.transport.rpc import ErrorInterceptor, connect
from paceline.v1 import access_pb2 as pb
from paceline.v1 import access_pb2_grpc
from paceline.v1.access_pb2_grpc import AuthenticationStub
from paceline_gateway.access.authentication import FRESH_S, Authenticator
from paceline_gateway.access.rates import AccessRates, network_of
from paceline_gateway.access.refusals import Refusals

# Powers of two, so that sums of times are exact.
LIMITS = AccessLimits(
    failed_per_s=0.5,
    failed_burst=4,
    all_failed_per_s=2.0,
    all_failed_burst=8,
    calls_per_s=4.0,
    calls_burst=8,
)
STRANGERS = [f"10.0.0.{number}" for number in range(6)]
MAX_KEYS = 4


class Clock:
    """Stands still unless moved."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now


def allowed(rates: AccessRates, source: str) -> bool:
    try:
        rates.check(source)
    except RateError:
        return False
    return True


STEPS = st.lists(
    st.tuples(st.sampled_from(STRANGERS), st.sampled_from([0.0, 0.25, 1.0, 8.0])), max_size=120
)


@given(STEPS)
def test_whoever_has_not_failed_is_never_refused(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    rates = AccessRates(LIMITS, clock=clock, max_keys=MAX_KEYS)
    for source, pause_s in steps:
        clock.now += pause_s
        if allowed(rates, source):
            rates.failed(source)
        assert allowed(rates, "10.9.9.9")


@given(STEPS)
def test_an_address_fails_no_more_than_its_rate(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    rates = AccessRates(LIMITS, clock=clock)
    began, failures = clock.now, dict.fromkeys(STRANGERS, 0)
    for source, pause_s in steps:
        clock.now += pause_s
        if allowed(rates, source):
            rates.failed(source)
            failures[source] += 1
        passed_s = clock.now - began
        assert failures[source] <= LIMITS.failed_burst + LIMITS.failed_per_s * passed_s
        # The first failure of an address is never kept back.
        most = LIMITS.all_failed_burst + LIMITS.all_failed_per_s * passed_s + len(STRANGERS)
        assert sum(failures.values()) <= most


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), max_size=60))
def test_a_refused_caller_is_answered_when_it_was_told(pauses: list[float]) -> None:
    clock = Clock()
    rates = AccessRates(LIMITS, clock=clock)
    who = Principal("t", "ann", "a", Role.READ)
    for pause_s in pauses:
        clock.now += pause_s
        try:
            rates.call(who)
        except RateError as error:
            clock.now += error.retry_after_s
            rates.call(who)


def test_calls_are_counted_by_token() -> None:
    rates = AccessRates(LIMITS, clock=Clock())
    for _ in range(LIMITS.calls_burst):
        rates.call(Principal("t", "ann", "a", Role.READ))
    with pytest.raises(RateError, match=r"limits.access.calls_per_s"):
        rates.call(Principal("t", "ann", "a", Role.READ))
    rates.call(Principal("u", "ann", "a", Role.READ))


def test_addresses_without_end_fill_no_memory() -> None:
    rates = AccessRates(LIMITS, clock=Clock(), max_keys=MAX_KEYS)
    for number in range(1000):
        rates.failed(f"10.0.{number // 250}.{number % 250}")
    assert rates.num_addresses == MAX_KEYS


def test_by_default_nobody_is_refused_who_makes_thousands_of_calls_a_second() -> None:
    clock = Clock()
    rates = AccessRates(AccessLimits(), clock=clock)
    who = Principal("t", "ann", "a", Role.READ)
    for _ in range(10):
        clock.now += 1.0
        for _ in range(8000):
            rates.call(who)


@pytest.mark.parametrize(
    ("source", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2:0:0:0:1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
        ("", ""),
    ],
)
def test_what_an_address_counts_as(source: str, network: str) -> None:
    assert network_of(source) == network


class Authentication(access_pb2_grpc.AuthenticationServicer):
    """Knows one token; counts what it is asked."""

    def __init__(self, valid: str) -> None:
        self.valid = token_digest(valid)
        self.asked = 0

    async def Authenticate(self, request: Any, context: Any) -> pb.AuthenticateReply:
        self.asked += 1
        if request.digest != self.valid:
            raise AuthenticationError("unknown")
        who = Principal(request.token_id, "ann", "a", Role.READ)
        return pb.AuthenticateReply(principal=wire.to_proto(who, pb.Principal))

    async def ReportRefusals(self, request: Any, context: Any) -> pb.ReportRefusalsReply:
        return pb.ReportRefusalsReply()


class World:
    """An authenticator that knows one token, and its upstream."""

    def __init__(self, service: Authentication, stub: Any, valid: str) -> None:
        self.service, self.valid, self.clock = service, valid, Clock()
        self.authenticator = Authenticator(
            authentication=stub,
            refusals=Refusals(authentication=stub, metrics=Metrics()),
            own={},
            limits=LIMITS,
            clock=self.clock,
        )

    async def enter(self, token: str, source: str) -> str:
        try:
            await self.authenticator.authorize(
                f"Bearer {token}", Role.READ, source=source, action="x"
            )
        except (AuthenticationError, RateError) as error:
            return type(error).__name__
        return "ok"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    valid = new_token()[1]
    service = Authentication(valid)
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())])
    access_pb2_grpc.add_AuthenticationServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield World(service, AuthenticationStub(channel), valid)
    await server.stop(0)


async def test_guesses_cost_the_experience_service_a_bounded_number_of_calls(world: World) -> None:
    ends = [await world.enter(new_token()[1], "10.0.0.1") for _ in range(50)]
    assert ends.count("AuthenticationError") == world.service.asked == LIMITS.failed_burst
    assert ends.count("RateError") == 50 - LIMITS.failed_burst
    world.clock.now += 1 / LIMITS.failed_per_s
    assert await world.enter(new_token()[1], "10.0.0.1") == "AuthenticationError"


async def test_a_valid_token_is_not_refused_for_failures_of_others(world: World) -> None:
    for number in range(60):
        await world.enter(new_token()[1], f"10.0.0.{number % 3}")
    assert await world.enter(world.valid, "10.9.9.9") == "ok"  # seen for the first time
    world.clock.now += FRESH_S  # so that it is asked for again
    for _ in range(20):
        await world.enter(new_token()[1], "10.9.9.9")
    assert await world.enter(world.valid, "10.9.9.9") == "ok"  # from the address that guesses


async def test_many_first_calls_of_a_valid_token_at_once_are_no_guesses(world: World) -> None:
    ends = await asyncio.gather(*(world.enter(world.valid, "10.0.0.1") for _ in range(50)))
    assert set(ends) == {"ok"}
