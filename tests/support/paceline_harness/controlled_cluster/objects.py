"""An administrator's access to the objects of a cluster, by kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import kubernetes
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError

from kubernetes_double.api import ApiServer
from paceline_harness.patience import PATIENCE_S

NAMESPACE, RELEASE, ACCOUNT = "ml", "rel", "rel-paceline-controller"


KINDS = {
    "Deployment": "apps/v1",
    "Event": "events.k8s.io/v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "Lease": "coordination.k8s.io/v1",
    "Namespace": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Pod": "v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "Secret": "v1",
    "Service": "v1",
    "ServiceAccount": "v1",
    "TrainingJob": "paceline.dev/v1alpha1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
}


MERGE = "application/merge-patch+json"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first true result of a condition."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


class Cluster:
    """An administrator's access to the API, by kind, with plain objects."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        client = kubernetes.config.new_client_from_config(str(server.kubeconfig))
        self._client = DynamicClient(client)
        self._resources: dict[str, Any] = {}

    def of(self, kind: str) -> Any:
        if kind not in self._resources:
            found = self._client.resources.get(api_version=KINDS[kind], kind=kind)
            self._resources[kind] = found
        return self._resources[kind]

    def create(self, kind: str, name: str, **fields: Any) -> dict[str, Any]:
        metadata = {"name": name, **fields.pop("metadata", {})}
        body = {"apiVersion": KINDS[kind], "kind": kind, "metadata": metadata, **fields}
        return self.of(kind).create(body=body, namespace=NAMESPACE).to_dict()

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        found = self.of(kind).get(namespace=NAMESPACE, label_selector=selector)
        return [item.to_dict() for item in found.items]

    def names(self, kind: str) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.list(kind))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            return self.of(kind).get(name=name, namespace=NAMESPACE).to_dict()
        except NotFoundError:
            return None

    def patch(self, kind: str, name: str, changes: dict[str, Any]) -> None:
        self.of(kind).patch(body=changes, name=name, namespace=NAMESPACE, content_type=MERGE)

    def set_status(self, kind: str, name: str, status: dict[str, Any]) -> None:
        body = {"status": status}
        resource = self.of(kind).status
        resource.patch(body=body, name=name, namespace=NAMESPACE, content_type=MERGE)

    def delete(self, kind: str, name: str, *, grace_s: int | None = None) -> None:
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        self.of(kind).delete(name=name, namespace=NAMESPACE, body=options)

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [event for event in self.list("Event") if event["reason"] == reason]
