import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from paceline.config.service import ServiceSettings, TlsSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError, UnavailableError
from paceline.platform.server.chassis import bind
from paceline.platform.transport import rpc
from paceline.platform.transport.tls import wait_for_renewal
from paceline_harness.certificates import Authority
from paceline_harness.patience import PATIENCE_S


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, name="ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path, name="theirs")


def settings_of(tls: TlsSettings | None) -> ServiceSettings:
    return ServiceSettings(kind=WorkerKind.REWARD, worker_id="reward-0", tls=tls)


@asynccontextmanager
async def served(tls: TlsSettings | None) -> AsyncGenerator[str]:
    server = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    port = bind(server, settings_of(tls))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def answers(address: str, tls: TlsSettings | None) -> bool:
    async with rpc.connect_as(settings_of(tls), address) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        reply = await rpc.call(check, health_pb2.HealthCheckRequest(), timeout_s=PATIENCE_S)
    return reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_both_sides_of_one_authority_connect(ours: Authority) -> None:
    async with served(ours.issue("server")) as address:
        assert await answers(address, ours.issue("client"))


async def test_a_caller_without_a_certificate_is_refused(ours: Authority) -> None:
    async with served(ours.issue("server")) as address:
        with pytest.raises(UnavailableError):
            await answers(address, None)


async def test_a_caller_of_another_authority_is_refused(ours: Authority, theirs: Authority) -> None:
    stranger = theirs.issue("client").model_copy(update={"authority": ours.path})
    async with served(ours.issue("server")) as address:
        with pytest.raises(UnavailableError):
            await answers(address, stranger)


async def test_a_server_of_another_authority_is_refused(ours: Authority, theirs: Authority) -> None:
    stranger = theirs.issue("server").model_copy(update={"authority": ours.path})
    async with served(stranger) as address:
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await answers(address, ours.issue("client"))


async def test_a_server_with_another_name_is_refused(ours: Authority) -> None:
    async with served(ours.issue("server", domain="elsewhere")) as address:
        with pytest.raises(UnavailableError, match="Hostname Verification"):
            await answers(address, ours.issue("client"))
        assert await answers(address, ours.issue("client", peer_name="elsewhere"))


async def test_a_server_of_another_kind_is_refused(ours: Authority) -> None:
    """A rollout worker cannot impersonate the experience service."""
    async with served(ours.issue("server", kinds=[WorkerKind.ROLLOUT])) as address:
        with pytest.raises(UnavailableError, match="Hostname Verification"):
            await answers(address, ours.issue("client"))


async def test_a_server_may_accept_callers_without_certificates(
    ours: Authority, theirs: Authority
) -> None:
    stranger = theirs.issue("client").model_copy(update={"authority": ours.path})
    async with served(ours.issue("server", require_client=False)) as address:
        assert await answers(address, stranger)


@pytest.mark.parametrize(
    ("field", "content", "says"),
    [
        ("key", None, "tls.key: .*server.key: No such file"),
        ("key", b"secret words", "are not a PEM certificate and its unencrypted key$"),
        ("certificate", b"", "are not a PEM certificate and its unencrypted key$"),
        ("authority", b"\xff", "tls.authority: .*ca.crt holds no PEM certificates$"),
        ("authority", b"", "tls.authority: .*ca.crt holds no PEM certificates$"),
    ],
)
async def test_invalid_files_are_named(
    ours: Authority, field: str, content: bytes | None, says: str
) -> None:
    tls = ours.issue("server")
    path: Path = getattr(tls, field)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for attempt in (
        lambda: bind(aio.server(), settings_of(tls)),
        lambda: rpc.connect("a:1", tls=tls),
    ):
        with pytest.raises(ConfigError, match=says):
            attempt()


async def test_a_key_of_another_certificate_is_named(ours: Authority) -> None:
    tls = ours.issue("server").model_copy(update={"key": ours.issue("other").key})
    with pytest.raises(ConfigError, match=r"other\.key are not a PEM certificate and its"):
        bind(aio.server(), settings_of(tls))


class Sleeps:
    """A clock that advances during sleeps and triggers actions at given times."""

    def __init__(self, **at: Any) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self._at = sorted((float(when.removeprefix("s")), act) for when, act in at.items())

    async def __call__(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s
        while self._at and self._at[0][0] <= self.now_s:
            self._at.pop(0)[1]()
        await asyncio.sleep(0)


async def test_new_contents_end_the_wait_after_a_random_part_of_the_time(ours: Authority) -> None:
    tls = ours.issue("server", reload_within_s=1000)
    sleeps = Sleeps(s100=lambda: ours.issue("server"))
    await wait_for_renewal(tls, rng=lambda: 0.25, sleep=sleeps)
    assert sleeps.pauses == [10.0] * 10 + [250.0]


async def test_moved_and_briefly_missing_files_are_not_a_change(
    ours: Authority, tmp_path: Path
) -> None:
    """Kubernetes updates a volume by pointing a link to a new folder."""
    made = ours.issue("server")
    first, second, third = (tmp_path / name for name in ("1", "2", "3"))
    for folder in (first, second, third):
        folder.mkdir()
        for path in (made.certificate, made.key, made.authority):
            (folder / path.name).write_bytes(path.read_bytes())
    (third / "server.crt").write_bytes(ours.issue("server").certificate.read_bytes())
    link = tmp_path / "..data"
    link.symlink_to(first)

    def point(folder: Path) -> None:
        link.unlink()
        link.symlink_to(folder)

    tls = TlsSettings(
        certificate=link / "server.crt",
        key=link / "server.key",
        authority=link / "ca.crt",
        reload_within_s=1000,
    )
    sleeps = Sleeps(
        s100=lambda: point(second),
        s200=lambda: point(tmp_path / "missing"),
        s300=lambda: point(second),
        s400=lambda: point(third),
    )
    await wait_for_renewal(tls, rng=lambda: 1.0, sleep=sleeps)
    assert sleeps.now_s == 1400.0
