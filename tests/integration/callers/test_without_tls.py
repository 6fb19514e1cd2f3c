"""Services without certificates: keys, and all that is no credential."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from paceline.config.service import ServiceSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline.platform.server.chassis import Chassis, Service, serve
from paceline.platform.transport.rpc_authorization import allowed_callers
from paceline.platform.transport.service_keys import METADATA_KEY, issue
from paceline_harness.callers.served import Caller, methods, path_of, served, services
from paceline_harness.callers.service_keys import metadata_of
from paceline_harness.certificates import Authority

WITHOUT = "a caller without a service's certificate or credential"


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, name="ours")


@pytest.mark.parametrize("server", WorkerKind)
async def test_without_tls_strangers_get_nowhere(server: WorkerKind, tmp_path: Path) -> None:
    """Nothing, and everything that is almost a credential of a kind that may call the method."""
    folder, theirs = tmp_path / "ours", tmp_path / "theirs"
    own = issue(folder, [server])[server]
    issue(theirs, [server])
    everybody = server is WorkerKind.GATEWAY
    async with served(server, None, service_keys=own) as chassis:
        for method in methods(server):
            allowed = allowed_callers(server, path_of(method))
            if allowed is None:
                continue
            speaker = min(allowed, default=server)
            ((_, right),) = metadata_of(folder, server, speaker)
            ((_, foreign),) = metadata_of(theirs, server, speaker)
            other = next(kind for kind in WorkerKind if kind != server)
            ((_, elsewhere),) = metadata_of(folder, other, speaker)
            wrong = ["", "/", right[:-1], f"{right}0", right.partition("/")[2], foreign, elsewhere]
            wrong += [f"{speaker}/", f"nobody/{right.partition('/')[2]}", right.upper()]
            for text in [None, *wrong]:
                caller = Caller(chassis, None, () if text is None else ((METADATA_KEY, text),))
                code, said, _ = await caller.call(method)
                assert code is StatusCode.PERMISSION_DENIED, f"{text!r} {path_of(method)}"
                assert said == f"{WITHOUT} may not call {path_of(method)}"
                caller.channel.close()
        assert everybody or refused_strangers(chassis) > 0


def refused_strangers(chassis: Chassis) -> float:
    found = chassis.metrics.registry.get_sample_value(
        "paceline_refused_calls_total", {"caller": "none"}
    )
    return found or 0.0


async def test_a_server_with_certificates_takes_no_key(ours: Authority, tmp_path: Path) -> None:
    kind = WorkerKind.REWARD
    folder = tmp_path / "keys"
    issue(folder, [kind])
    tls = ours.issue("server", kinds=[kind], require_client=False)
    score = services()["Reward"].methods_by_name["Score"]
    async with served(kind, tls) as chassis:
        trusting = grpc.ssl_channel_credentials(tls.authority.read_bytes())
        proof = metadata_of(folder, kind, WorkerKind.ENVIRONMENT)
        caller = Caller(chassis, trusting, proof)
        assert (await caller.call(score))[0] is StatusCode.PERMISSION_DENIED
        caller.channel.close()


@pytest.mark.parametrize("kind", WorkerKind)
async def test_a_server_says_who_may_call_or_does_not_start(
    kind: WorkerKind, ours: Authority, tmp_path: Path
) -> None:
    async def build(chassis: Chassis) -> Service:
        raise AssertionError("it starts")

    keys = issue(tmp_path / "keys", [kind, WorkerKind.REWARD, WorkerKind.TRAINER])
    other = WorkerKind.REWARD if kind is not WorkerKind.REWARD else WorkerKind.TRAINER
    broken = tmp_path / "broken.json"
    broken.write_text('{"keys": {"reward": "0123456789abcdef"}}')
    tls = ours.issue("server", kinds=[kind])
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "tls, service_keys, insecure: exactly one is needed"),
        ({"tls": tls, "service_keys": keys[kind]}, "exactly one is needed"),
        ({"service_keys": keys[kind], "insecure": True}, "exactly one is needed"),
        ({"service_keys": tmp_path / "none.json"}, "service_keys: .*No such file"),
        ({"service_keys": broken}, "is not a file of keys"),
        ({"service_keys": keys[other]}, f"the file has no key of {kind}"),
    ]
    for fields, message in cases:
        settings = ServiceSettings(kind=kind, worker_id="w", **fields)
        with pytest.raises(ConfigError, match=message) as refusal:
            await serve(settings, build)
        assert "0123456789abcdef" not in str(refusal.value)


async def test_no_second_value_or_other_key_is_a_credential(tmp_path: Path) -> None:
    """What is right for another server or kind stays wrong, however it is sent beside."""
    folder, kind = tmp_path / "keys", WorkerKind.REWARD
    own = issue(folder, [kind])[kind]
    ((_, right),) = metadata_of(folder, kind, WorkerKind.ENVIRONMENT)
    ((_, controller),) = metadata_of(folder, kind, WorkerKind.CONTROLLER)
    ((_, itself),) = metadata_of(folder, kind, kind)
    ((_, elsewhere),) = metadata_of(folder, WorkerKind.EXPERIENCE, WorkerKind.ENVIRONMENT)
    proof = right.partition("/")[2]
    claims: list[tuple[tuple[str, Any], ...]] = [
        ((METADATA_KEY, controller),),
        ((METADATA_KEY, itself),),
        ((METADATA_KEY, controller), (METADATA_KEY, itself)),
        ((METADATA_KEY, f"environment/{controller.partition('/')[2]}"),),
        ((METADATA_KEY, f"controller/{proof}"),),
        ((METADATA_KEY, elsewhere), (METADATA_KEY, f"{elsewhere},{right}")),
        ((METADATA_KEY, f"{right},{right}"),),
        ((METADATA_KEY, f"environment//{proof}"),),
        ((METADATA_KEY, f"Environment/{proof}"),),
        ((METADATA_KEY, f"environment/{proof.upper()}"),),
        ((METADATA_KEY, "environment/"),),
        ((f"{METADATA_KEY}-bin", right.encode()),),
        (("authorization", f"Bearer {right}"), ("paceline-kind", "environment")),
        (("insecure", "true"), ("x-forwarded-client-cert", "DNS=environment.paceline.internal")),
    ]
    score = services()["Reward"].methods_by_name["Score"]
    async with served(kind, None, service_keys=own) as chassis:
        for metadata in claims:
            caller = Caller(chassis, None, metadata)
            assert (await caller.call(score))[0] is StatusCode.PERMISSION_DENIED, metadata
            caller.channel.close()
        caller = Caller(chassis, None, ((METADATA_KEY, right),))
        assert (await caller.call(score))[0] is not StatusCode.PERMISSION_DENIED
        caller.channel.close()
