"""The experience service on a real store, with clients that act as trainer and worker."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import (
    AsyncIterator,
    Iterator,
)
from pathlib import Path

import pytest

from paceline.config import ServiceSettings
from paceline.config.tokenizers import TokenizerSettings
from paceline.enums import WorkerKind
from paceline.platform.server.chassis import Chassis, serve
from paceline_experience.store.store import Store
from paceline_gateway.service import GatewayService
from paceline_gateway.service import build as build_gateway
from paceline_harness.experience_service.clients import LIMIT_S, Client
from paceline_harness.experience_service.serving import Killable, Lives, serving
from paceline_harness.experience_service.stores import cluster, one_server
from paceline_harness.ports import held_port

GATEWAY_TOKEN = "pl_bootstrap_of_these_tests"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The service as a whole is tried on a store of each kind, its parts on the stricter one."""
    if "server_url" in metafunc.fixturenames:
        whole = metafunc.definition.path.name == "test_experience_service.py"
        kinds = ["one server", "cluster"] if whole else ["cluster"]
        metafunc.parametrize("server_url", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A store; a cluster rejects operations across slots."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        start = cluster if request.param == "cluster" else one_server
        with start(Path(folder)) as url:
            yield url


@pytest.fixture
async def store_url(server_url: str) -> str:
    """An empty store."""
    store = await Store.connect(server_url, wait_s=LIMIT_S)
    await store.redis.flushall()
    await store.close()
    return server_url


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[tuple[Killable, str]]:
    """A killable service, with the URL of its store, which allows queries across jobs."""
    with (
        tempfile.TemporaryDirectory(prefix="pl") as folder,
        one_server(Path(folder)) as url,
        held_port() as port,
    ):
        service = Killable(url, tmp_path, port)
        service.start()
        yield service, url
        service.kill()


@pytest.fixture
def killables() -> type[Killable]:
    """Makes a killable service from a store, a run directory and a port."""
    return Killable


@pytest.fixture
def one_store() -> Iterator[str]:
    """The URL of a new, empty store."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder, one_server(Path(folder)) as url:
        yield url


@pytest.fixture
async def client(store_url: str, tmp_path: Path) -> AsyncIterator[Client]:
    async with serving(store_url, tmp_path) as found:
        yield found


@pytest.fixture
def lives() -> Lives:
    """Starts the service on a store and a run directory."""
    return serving


@pytest.fixture
def client_class() -> type[Client]:
    """All stubs on a channel of the test's own."""
    return Client


@pytest.fixture
async def url(client: Client, tmp_path: Path) -> AsyncIterator[str]:
    """Of the gateway."""
    folder = tmp_path / "gateway"
    folder.mkdir()
    made: asyncio.Future[Chassis] = asyncio.get_running_loop().create_future()

    async def note(chassis: Chassis) -> GatewayService:
        made.set_result(chassis)
        return await build_gateway(chassis)

    settings = ServiceSettings(
        kind=WorkerKind.GATEWAY,
        worker_id="gateway-0",
        run_dir=folder,
        experience=client.address,
        grace_s=3.0,
        token=GATEWAY_TOKEN,
        insecure=True,
        tokenizers=TokenizerSettings(run_in="in_process"),
        options={"http_port": 0},
    )
    serving = asyncio.create_task(serve(settings, note))
    chassis = await made
    while not (folder / "gateway.json").exists():
        assert not serving.done(), serving
        await asyncio.sleep(0.01)
    yield json.loads((folder / "gateway.json").read_text())["http"]
    chassis.stop()
    assert await serving == 0


@pytest.fixture
def grpc(url: str, tmp_path: Path) -> str:
    """Of the gateway too."""
    return json.loads((tmp_path / "gateway" / "gateway.json").read_text())["grpc"]
