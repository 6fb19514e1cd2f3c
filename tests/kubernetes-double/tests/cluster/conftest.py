"""One cluster for all tests in this folder, with a namespace for each."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kubernetes_double import Cluster, Node

Object = dict[str, Any]
RESOURCES = {"cpu": "64", "memory": "256Gi", "pods": "110"}
GPUS = {**RESOURCES, "nvidia.com/gpu": "2"}
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
NODES = (
    Node(name="plain-a", resources=RESOURCES),
    Node(name="plain-b", resources=RESOURCES, labels={"disk": "fast"}),
    Node(name="gpu-a", resources=GPUS, labels={"gpu": "h100"}, taints=(TAINT,)),
)


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := Cluster.unavailable_reason():
        pytest.skip(reason)
    with Cluster(folder=tmp_path_factory.mktemp("cluster") / "c", nodes=NODES) as made:
        yield made


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def cluster(machines: Cluster, numbers: Iterator[int]) -> Iterator[Cluster]:
    """The cluster, with a new namespace for the test, which is emptied afterwards."""
    machines.namespace = name = f"test-{next(numbers)}"
    metadata = {"name": name}
    machines.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}])
    machines.until(lambda: machines.get("ServiceAccount", "default"), "pods can be created")
    yield machines
    machines.delete("Namespace", name)
    machines.until(lambda: not machines.pods(), "no pods after the test")


@pytest.fixture(scope="session")
def pod() -> Callable[..., Object]:
    """A pod that runs Python code; `container` and `spec` override fields."""

    def make(name: str, code: str, *, container: Object | None = None, **spec: Any) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": template(code, container=container, **spec)["spec"],
        }

    return make


@pytest.fixture(scope="session")
def workload() -> Callable[..., Object]:
    """A Deployment, StatefulSet or Job whose pods run Python code."""

    def make(kind: str, name: str, code: str, *, more: Object | None = None, **spec: Any) -> Object:
        metadata = {"name": name, "labels": {"app": name}}
        body: Object = {"template": template(code, labels={"app": name}, **spec)}
        group = "batch/v1" if kind == "Job" else "apps/v1"
        if kind != "Job":
            body["selector"] = {"matchLabels": {"app": name}}
        if kind == "StatefulSet":
            body["serviceName"] = name
        return {
            "apiVersion": group,
            "kind": kind,
            "metadata": metadata,
            "spec": body | (more or {}),
        }

    return make


@pytest.fixture(scope="session")
def service() -> Callable[..., Object]:
    """A Service for the pods labelled with its name."""

    def make(name: str, port: int = 8080, **spec: Any) -> Object:
        content = {"selector": {"app": name}, "ports": [{"name": "main", "port": port}], **spec}
        metadata = {"name": name}
        return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": content}

    return make


@pytest.fixture
def finished(cluster: Cluster) -> Callable[..., str]:
    """Waits for a pod's end; returns its phase."""

    def wait(name: str) -> str:
        def over() -> bool:
            return phase_of(cluster, name) in ("Succeeded", "Failed")

        cluster.until(over, f"{name} ends")
        return phase_of(cluster, name)

    return wait


def phase_of(cluster: Cluster, name: str) -> str:
    found = cluster.get("Pod", name) or {}
    return found.get("status", {}).get("phase", "")


def template(
    code: str,
    *,
    container: Object | None = None,
    labels: dict[str, str] | None = None,
    **spec: Any,
) -> Object:
    main: Object = {"name": "main", "image": "test", "command": ["python", "-u", "-c", code]}
    main |= container or {}
    body: Object = {"containers": [main], "terminationGracePeriodSeconds": 2, **spec}
    return {"metadata": {"labels": labels or {}}, "spec": body}
