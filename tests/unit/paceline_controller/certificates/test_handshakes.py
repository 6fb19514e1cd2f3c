"""Real handshakes between processes that hold the files of different moments of a rotation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline_controller.certificates.config import DOMAIN, Issue
from paceline_controller.certificates.content import Data, leaf_data
from paceline_controller.certificates.issue import State, renew
from paceline_controller.certificates.pair import renewal
from paceline_harness.patience import PATIENCE_S

MakeIssue = Callable[..., Issue]


def settle(state: State, issue: Issue, now: datetime) -> State:
    for _ in range(4):
        state = renew(state, issue, now)
    return state


def files(state: State, service: str) -> Data:
    issued = state.leaves[service]
    assert issued is not None
    return leaf_data(issued)


def shake(server_has: Data, client_has: Data, name: str = DOMAIN) -> bool:
    """Whether a call goes through, with both sides verified."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    pair = (server_has["tls.key"], server_has["tls.crt"])
    credentials = grpc.ssl_server_credentials([pair], server_has["ca.crt"], True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    channel = grpc.secure_channel(
        f"127.0.0.1:{port}",
        grpc.ssl_channel_credentials(
            client_has["ca.crt"], client_has["tls.key"], client_has["tls.crt"]
        ),
        options=[("grpc.ssl_target_name_override", name)],
    )
    try:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    except grpc.RpcError:
        return False
    finally:
        channel.close()
        server.stop(None)
    return True


@pytest.fixture
def moments(make_issue: MakeIssue) -> list[State]:
    """The stages of a rotation, all in force today, so that real handshakes accept them."""
    issue = make_issue(days=90, authority_days=200)
    now = datetime.now(UTC)
    first = settle(State(None, {}), issue, now - timedelta(days=89))
    assert first.authority is not None
    # As if it were old: a name that only a new authority may sign asks for one as well.
    wider = make_issue(
        days=90,
        authority_days=200,
        services={
            "gateway": {"secret": "p-tls-gateway", "names": ["p-gateway", "new.example"]},
            "experience": {"secret": "p-tls-experience", "names": ["p-experience"]},
        },
    )
    renewed = settle(first, issue, now - timedelta(days=20))
    told = settle(renewed, wider, now - timedelta(days=10))
    signed = settle(told, wider, now - timedelta(days=9))
    lost = settle(State(signed.authority, {}), wider, now - timedelta(days=8))
    return [first, renewed, told, signed, lost]


def test_neighbours_in_time_trust_each_other(moments: list[State]) -> None:
    authorities = {m.authority.active.certificate for m in moments if m.authority}
    assert len(authorities) == 2
    for before, after in pairwise(moments):
        assert shake(files(before, "experience"), files(after, "gateway"))
        assert shake(files(after, "experience"), files(before, "gateway"))
        assert shake(files(after, "experience"), files(after, "gateway"))


def test_names_of_the_service_and_its_role_are_accepted(moments: list[State]) -> None:
    last = moments[-1]
    gateway, experience = files(last, "gateway"), files(last, "experience")
    assert shake(gateway, experience, name="gateway.paceline.internal")
    assert shake(gateway, experience, name="new.example")
    assert not shake(gateway, experience, name="experience.paceline.internal")


def test_a_peer_without_the_new_authority_refuses_it(moments: list[State]) -> None:
    """What the time between the first and the last step is for."""
    before, after = moments[1], moments[-1]
    assert not shake(files(before, "experience"), files(after, "gateway"))
    assert not shake(files(after, "experience"), files(before, "gateway"))


def test_another_installation_is_refused(make_issue: MakeIssue, moments: list[State]) -> None:
    other = settle(State(None, {}), make_issue(), datetime.now(UTC))
    assert not shake(files(moments[-1], "experience"), files(other, "gateway"))


def test_an_authority_of_two_thirds_is_followed(make_issue: MakeIssue) -> None:
    """The same by age: made long ago, still in force."""
    issue = make_issue(days=30, authority_days=300)
    now = datetime.now(UTC)
    old = settle(State(None, {}), issue, now - timedelta(days=210))
    assert old.authority is not None
    assert renewal(old.authority.active.certificate) < now
    told = settle(old, issue, now - timedelta(days=2))
    signed = settle(told, issue, now)
    assert signed.authority is not None
    assert signed.authority.active.certificate != old.authority.active.certificate
    lost = settle(State(signed.authority, {}), issue, now)
    assert shake(files(told, "experience"), files(lost, "gateway"))
    assert shake(files(lost, "experience"), files(told, "gateway"))
