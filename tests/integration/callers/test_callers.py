"""Every RPC of every service over real gRPC, with proofs of every kind and with none.

Services prove their kind by certificates or, without TLS, by the credentials of their kind.

The servers are the chassis with methods that are not implemented: a call that passes the check
fails in the method, with INTERNAL, and one that does not is refused before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from paceline.enums import JobState, WorkerKind
from paceline.platform import wire
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.transport.rpc_authorization import UNKNOWN_METHOD, allowed_callers, callers
from paceline.v1 import experience_pb2, roster_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import add_ExperienceServicer_to_server
from paceline.v1.roster_pb2_grpc import add_RosterServicer_to_server
from paceline.v1.types_pb2 import Worker
from paceline_experience.api.experience import ExperienceServicer
from paceline_experience.api.roster import RosterServicer
from paceline_experience.fleet.roster import Roster
from paceline_harness.callers.served import (
    HEALTH,
    TOKEN,
    Caller,
    Certificates,
    Keys,
    Proofs,
    credentials_of,
    methods,
    path_of,
    refusals,
    served,
    services,
)
from paceline_harness.certificates import LIFE, Authority

ROOT = Path(__file__).resolve().parents[3]
REFUSED = {StatusCode.UNAVAILABLE, StatusCode.PERMISSION_DENIED, StatusCode.UNAUTHENTICATED}
PAST = StatusCode.INTERNAL
WITHOUT = "a caller without a service's certificate or credential"


# the table -----------------------------------------------------------------------------------


def test_every_rpc_has_its_row() -> None:
    served = {service for rows in callers().values() for service in rows}
    assert served == set(services())
    for server, rows in callers().items():
        for service, row in rows.items():
            names = {method.name for method in services()[service].methods}
            assert set(row) == names, (
                f"{service} of {server} has other methods than the table of callers"
            )


@pytest.mark.parametrize("server", WorkerKind)
def test_the_table_covers_all_served_methods(server: WorkerKind) -> None:
    sources = (ROOT / "services" / f"paceline_{server}").rglob("*.py")
    code = "\n".join(path.read_text() for path in sources)
    served = set(re.findall(r"add_(\w+)Servicer_to_server\(", code))
    assert served <= set(callers()[server])


@pytest.mark.parametrize("kind", WorkerKind)
def test_a_service_may_call_what_it_calls(kind: WorkerKind) -> None:
    sources = (ROOT / "services" / f"paceline_{kind}").rglob("*.py")
    code = "\n".join(path.read_text() for path in sources)
    rows = callers()[WorkerKind.EXPERIENCE]
    called = set(re.findall(r"\bself\._([a-z]+)\.([A-Z]\w+)\b", code))
    known = [(s.title(), m) for s, m in called if m in rows.get(s.title(), {})]
    assert known or kind in {WorkerKind.EXPERIENCE, WorkerKind.REWARD}
    assert [(s, m) for s, m in known if kind not in (rows[s][m] or ())] == []


@pytest.mark.parametrize("server", WorkerKind)
def test_undeclared_methods_are_for_nobody(server: WorkerKind) -> None:
    for method in ("/paceline.v1.Jobs/Newest", "/other.Jobs/GetJob", "/paceline.v1.Health/Check"):
        assert allowed_callers(server, method) == UNKNOWN_METHOD
    for odd in ("", "/", "//", "GetJob", "/paceline.v1.Jobs", "/paceline.v1.Jobs/GetJob/"):
        assert allowed_callers(server, odd) == UNKNOWN_METHOD


# the sweep -----------------------------------------------------------------------------------


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, name="ours")


@pytest.mark.parametrize("server", WorkerKind)
@pytest.mark.parametrize("proofs_of", [Certificates, Keys])
async def test_only_the_kinds_of_the_table_get_past(
    server: WorkerKind, proofs_of: Callable[[Path], Proofs], tmp_path: Path
) -> None:
    proofs = proofs_of(tmp_path)
    asks, refused = proofs.asks(server), 0
    async with served(server, **proofs.server(server)) as chassis:
        for kind in WorkerKind:
            caller = proofs.caller(chassis, kind)
            for method in methods(server):
                allowed = allowed_callers(server, path_of(method))
                code, text, metadata = await caller.call(method)
                # Of the gateway's own methods tokens decide: see tests/integration/access.
                if allowed is None or kind in allowed:
                    past = StatusCode.OK if method.containing_service is HEALTH else PAST
                    assert code is past, f"{kind} {path_of(method)}: {text}"
                else:
                    says = f"a service of kind {kind}" if asks else WITHOUT
                    expected = f"{says} may not call {path_of(method)}"
                    assert (code, text) == (StatusCode.PERMISSION_DENIED, expected)
                    assert metadata == {"paceline-error": "PermissionDeniedError"}
                    refused += asks
                assert TOKEN not in text
            caller.channel.close()
        assert refusals(chassis) == refused


@pytest.mark.parametrize("server", WorkerKind)
async def test_strangers_get_nowhere(server: WorkerKind, ours: Authority, tmp_path: Path) -> None:
    """Callers with foreign, expired, not yet valid or no certificates, and without TLS."""
    theirs = Authority(tmp_path, name="theirs")
    everybody = server is WorkerKind.GATEWAY
    tls = ours.issue("server", kinds=[server], require_client=not everybody)
    strangers = {
        "foreign": credentials_of(theirs.issue("all"), tls),
        "expired": credentials_of(ours.issue("old", since=-2 * LIFE), tls),
        "early": credentials_of(ours.issue("early", since=timedelta(hours=1)), tls),
        "none": grpc.ssl_channel_credentials(tls.authority.read_bytes()),
        "plain": None,
    }
    async with served(server, tls) as chassis:
        for name, credentials in strangers.items():
            caller = Caller(chassis, credentials)
            for method in methods(server):
                code, text, _ = await caller.call(method)
                # The gateway looks at tokens instead: see tests/integration/access.
                open_to_all = everybody and name != "plain"
                assert open_to_all or code in REFUSED, f"{name} {path_of(method)}"
                assert not re.search(rf"{TOKEN}|{tmp_path}|BEGIN", text), text
            caller.channel.close()


@pytest.mark.parametrize("server", [kind for kind in WorkerKind if kind is not WorkerKind.GATEWAY])
async def test_without_certificates_of_callers_nothing_but_the_gateway_answers(
    server: WorkerKind, ours: Authority
) -> None:
    tls = ours.issue("server", kinds=[server], require_client=False)
    async with served(server, tls) as chassis:
        caller = Caller(chassis, grpc.ssl_channel_credentials(tls.authority.read_bytes()))
        for method in methods(server):
            code, text, _ = await caller.call(method)
            says = f"{WITHOUT} may not call {path_of(method)}"
            assert (code, text) == (StatusCode.PERMISSION_DENIED, says)
        caller.channel.close()


async def test_a_certificate_may_speak_for_several_kinds_and_a_wildcard_for_none(
    ours: Authority,
) -> None:
    tls = ours.issue("server", kinds=[WorkerKind.REWARD])
    both = ours.issue("both", kinds=[WorkerKind.TRAINER, WorkerKind.ENVIRONMENT])
    other = ours.issue("other", kinds=[], names=["*.paceline.internal"])
    score = services()["Reward"].methods_by_name["Score"]
    async with served(WorkerKind.REWARD, tls) as chassis:
        for own, code in ((both, StatusCode.INTERNAL), (other, StatusCode.PERMISSION_DENIED)):
            caller = Caller(chassis, credentials_of(own, tls))
            assert (await caller.call(score))[0] is code
            caller.channel.close()


async def no_jobs(kept: Iterable[str]) -> Iterable[str]:
    return ()


class Central(Service):
    """The roster of the experience service, and an unimplemented ledger."""

    def __init__(self, chassis: Chassis) -> None:
        nothing: Any = None
        roster = RosterServicer(
            roster=Roster(lease_s=60), tracker=nothing, training=nothing, ended_jobs=no_jobs
        )
        ledger = ExperienceServicer(
            job_service=nothing,
            ledgers=nothing,
            dispatcher=nothing,
            training=nothing,
            artifacts=nothing,
            credentials=nothing,
        )
        add_RosterServicer_to_server(roster, chassis.server)
        add_ExperienceServicer_to_server(ledger, chassis.server)


@pytest.mark.parametrize("proofs_of", [Certificates, Keys])
async def test_nobody_speaks_for_another_kind(
    proofs_of: Callable[[Path], Proofs], tmp_path: Path
) -> None:
    proofs = proofs_of(tmp_path)
    join, beat, leave = (
        services()["Roster"].methods_by_name[name] for name in ("Join", "Heartbeat", "Leave")
    )
    move = services()["Experience"].methods_by_name["SetJobState"]
    own = proofs.server(WorkerKind.EXPERIENCE)
    async with served(WorkerKind.EXPERIENCE, service=Central, **own) as chassis:
        trainer, rollout = (
            proofs.caller(chassis, kind) for kind in (WorkerKind.TRAINER, WorkerKind.ROLLOUT)
        )

        async def tried(caller: Caller, method: Any, message: Any) -> StatusCode:
            return (await caller.call(method, message))[0]

        def worker(kind: WorkerKind) -> Any:
            member = wire.number_of(kind)
            return roster_pb2.JoinRequest(worker=Worker(worker_id="w", kind=member))

        denied = StatusCode.PERMISSION_DENIED
        assert await tried(rollout, join, worker(WorkerKind.TRAINER)) is denied
        assert await tried(trainer, join, worker(WorkerKind.TRAINER)) is StatusCode.OK
        assert await tried(rollout, join, worker(WorkerKind.ROLLOUT)) is denied
        assert await tried(rollout, beat, roster_pb2.HeartbeatRequest(worker_id="w")) is denied
        assert await tried(rollout, leave, roster_pb2.LeaveRequest(worker_id="w")) is denied
        assert await tried(trainer, leave, roster_pb2.LeaveRequest(worker_id="w")) is StatusCode.OK
        assert await tried(rollout, join, worker(WorkerKind.ROLLOUT)) is StatusCode.OK
        for state in set(JobState) - {JobState.FAILED}:
            request = experience_pb2.SetJobStateRequest(job_id="j", state=wire.number_of(state))
            assert await tried(trainer, move, request) is denied
        request = experience_pb2.SetJobStateRequest(job_id="j", state=types_pb2.JOB_STATE_FAILED)
        assert await tried(trainer, move, request) is PAST
        trainer.channel.close()
        rollout.channel.close()
