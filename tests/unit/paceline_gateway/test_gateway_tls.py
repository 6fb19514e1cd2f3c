"""The gateway's own certificates: users need none, their token counts."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc import aio

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.errors import AuthenticationError, ConfigError
from paceline.platform.server.chassis import serve
from paceline.platform.transport.tls import server_credentials
from paceline.v1 import jobs_pb2 as pb
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline_gateway.service import build
from paceline_harness.certificates import Authority
from paceline_harness.jobs import jobs_in_memory, serve_jobs
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

NAMES = ("localhost",)
ASK = pb.ListJobsRequest()


@dataclass
class Served:
    url: str
    grpc: str
    authority: bytes

    def channel(self) -> aio.Channel:
        """As a user connects: no certificate of their own."""
        credentials = grpc.ssl_channel_credentials(self.authority)
        return aio.secure_channel(self.grpc, credentials)


def settings(run_dir: Path, **changes: Any) -> ServiceSettings:
    fields: dict[str, Any] = {
        "kind": WorkerKind.GATEWAY,
        "worker_id": "gateway-0",
        "run_dir": run_dir,
        "token": "a secret of a user",
        "grace_s": 3.0,
        "options": {"http_port": 0, "https": True},
    }
    return ServiceSettings(**(fields | changes))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    authority = Authority(tmp_path)
    upstream, port = await serve_jobs(
        jobs_in_memory(), credentials=server_credentials(authority.issue("experience"))
    )
    tls = authority.issue("gateway", names=NAMES, require_client=False)
    gateway = settings(tmp_path, experience=f"127.0.0.1:{port}", tls=tls)
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def note(chassis: Any) -> Any:
        made.set_result(chassis)
        return await build(chassis)

    serving = asyncio.create_task(serve(gateway, note))
    chassis = await made
    while not (tmp_path / "gateway.json").exists():
        await asyncio.sleep(0.01)
    told = json.loads((tmp_path / "gateway.json").read_text())
    yield Served(
        url=told["http"].replace("127.0.0.1", "localhost"),
        grpc=told["grpc"].replace("127.0.0.1", "localhost"),
        authority=authority.path.read_bytes(),
    )
    chassis.stop()
    assert await serving == 0
    await upstream.stop(None)


async def test_grpc_wants_the_token_and_no_certificate(served: Served) -> None:
    async with served.channel() as channel:
        stub: JobsAsyncStub = JobsStub(channel)
        with pytest.raises(AuthenticationError):
            await call(stub.ListJobs, ASK)
        bearer = ("authorization", "Bearer a secret of a user")
        reply = await stub.ListJobs(ASK, timeout=PATIENCE_S, metadata=(bearer,))
    assert list(reply.jobs) == []


async def test_rest_is_served_with_the_same_certificate(served: Served) -> None:
    assert served.url.startswith("https://")
    trust = ssl.create_default_context(cadata=served.authority.decode())
    async with httpx.AsyncClient(base_url=served.url, verify=trust, timeout=PATIENCE_S) as http:
        assert (await http.get("/v1/jobs")).status_code == 401
        passed = await http.get("/v1/jobs", headers={"authorization": "Bearer a secret of a user"})
        assert (passed.status_code, passed.json()["jobs"]) == (200, [])
    async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as stranger:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get("/v1/jobs")


async def test_https_needs_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"options\.https: needs the certificate of tls"):
        await serve(settings(tmp_path, experience="127.0.0.1:1", insecure=True), build)


async def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def note(chassis: Any) -> Any:
        ready.set_result(chassis)
        return await build(chassis)

    changes = {"experience": "127.0.0.1:1", "options": {"http_port": 0}, "insecure": True}
    wanted = settings(tmp_path / "file" / "below", **changes)
    serving = asyncio.create_task(serve(wanted, note))
    chassis = await ready
    while chassis.health.why_unready():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not serving.done()
    chassis.stop()
    assert await serving == 0
