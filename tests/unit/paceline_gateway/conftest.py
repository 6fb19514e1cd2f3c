from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from grpc import aio

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.platform.server.chassis import Chassis, serve
from paceline.platform.transport.rpc import connect
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline_gateway.service import GatewayService, build
from paceline_harness.jobs import JobsInMemory, jobs_in_memory, serve_jobs
from paceline_harness.models.folders import write_empty_model
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import held_port

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub


TOKEN = "pl_bootstrap_of_these_tests"


class Gateway:
    """A gateway on loopback with its upstream."""

    def __init__(
        self, *, chassis: Chassis, url: str, jobs: JobsInMemory, upstream: aio.Server, port: int
    ) -> None:
        self.chassis = chassis
        self.jobs = jobs
        self.upstream = upstream
        self.upstream_port = port
        headers = {"authorization": f"Bearer {TOKEN}"}
        self.http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, headers=headers)
        self.channel = connect(chassis.address, token=TOKEN)
        self.stub: JobsAsyncStub = JobsStub(self.channel)

    async def post(self, job: Any, **headers: str) -> httpx.Response:
        """Submit over REST."""
        return await self.http.post("/v1/jobs", json=job, headers=headers)

    async def submitted(self, job: Any) -> str:
        """Submit a job; returns its id."""
        response = await self.post(job)
        assert response.status_code == 201, response.text
        return response.json()["status"]["job_id"]


def gateway_settings(run_dir: Path, experience: str, **changes: Any) -> ServiceSettings:
    fields: dict[str, Any] = {
        "kind": WorkerKind.GATEWAY,
        "worker_id": "gateway-0",
        "run_dir": run_dir,
        "experience": experience,
        "grace_s": 3.0,
        "token": TOKEN,
        "options": {"http_port": 0},
        "insecure": True,
        "tokenizers": {"run_in": "in_process"},  # models of most tests are none
    }
    return ServiceSettings(**(fields | changes))


@pytest.fixture
def settings_changes() -> dict[str, Any]:
    """Changes to the settings, overridden by tests."""
    return {}


@pytest.fixture
def upstream_port() -> Iterator[int]:
    """A reserved port, so that a stopped upstream can restart."""
    with held_port() as port:
        yield port


@pytest.fixture
async def gateway(
    tmp_path: Path, settings_changes: dict[str, Any], upstream_port: int
) -> AsyncIterator[Gateway]:
    jobs = jobs_in_memory()
    upstream, port = await serve_jobs(jobs, port=upstream_port)
    made: asyncio.Future[Chassis] = asyncio.get_running_loop().create_future()

    async def note(chassis: Chassis) -> GatewayService:
        made.set_result(chassis)
        return await build(chassis)

    settings = gateway_settings(tmp_path, f"127.0.0.1:{port}", **settings_changes)
    serving = asyncio.create_task(serve(settings, note))
    chassis = await made
    while not (tmp_path / "gateway.json").exists():
        assert not serving.done(), serving
        await asyncio.sleep(0.01)
    url = json.loads((tmp_path / "gateway.json").read_text())["http"]
    running = Gateway(chassis=chassis, url=url, jobs=jobs, upstream=upstream, port=port)
    yield running
    await running.http.aclose()
    await running.channel.close()
    chassis.stop()
    assert await serving == 0
    await upstream.stop(None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_empty_model(folder)
    return folder


@pytest.fixture
def job(model: Path) -> dict[str, Any]:
    return {
        "name": "demo",
        "model": {"path": str(model)},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
    }
