"""The server under test: that of KUBERNETES_DOUBLE_KUBECONFIG, or the double's own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, dynamic

from kubernetes_double.api import ApiServer

Object = dict[str, Any]


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if given := os.environ.get("KUBERNETES_DOUBLE_KUBECONFIG"):
        yield Path(given)
        return
    with ApiServer(folder=tmp_path_factory.mktemp("api")) as server:
        yield server.kubeconfig


@dataclass
class Clients:
    """One caller's view of the server, in its namespace."""

    api: client.ApiClient
    namespace: str

    def __post_init__(self) -> None:
        self.core: Any = client.CoreV1Api(self.api)
        self.apps: Any = client.AppsV1Api(self.api)
        self.batch: Any = client.BatchV1Api(self.api)
        self.leases: Any = client.CoordinationV1Api(self.api)
        self.rbac: Any = client.RbacAuthorizationV1Api(self.api)
        self.custom: Any = client.CustomObjectsApi(self.api)
        self.definitions: Any = client.ApiextensionsV1Api(self.api)

    def kind(self, api_version: str, kind: str) -> Any:
        found = dynamic.DynamicClient(self.api)
        return found.resources.get(api_version=api_version, kind=kind)

    def send(self, method: str, path: str, body: Any = None, **query: str) -> Object:
        """Send a raw request, bypassing the client's validation."""
        kind = query.pop("media", "application/json")
        media = {"Content-Type": kind, "Accept": query.pop("accept", "*/*")}
        request = self.api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=media,
            body=body,
            auth_settings=["BearerToken"],
        )
        answer: Any = self.api.call_api(*request)
        answer.read()
        if not 200 <= answer.status < 300:
            raise client.ApiException(http_resp=answer)
        return json.loads(answer.data)

    def settings(self, name: str, **more: Any) -> Any:
        body = {"metadata": {"name": name, **more.pop("metadata", {})}, **more}
        return self.core.create_namespaced_config_map(self.namespace, body)


@pytest.fixture(scope="session")
def admin(kubeconfig: Path) -> client.ApiClient:
    return config.new_client_from_config(str(kubeconfig))


@pytest.fixture
def clients(admin: client.ApiClient, until: Callable[..., Any]) -> Iterator[Clients]:
    """An administrator in its own namespace, which is deleted afterwards."""
    core: Any = client.CoreV1Api(admin)
    made = core.create_namespace({"metadata": {"generateName": "double-contract-"}})
    namespace: str = made.metadata.name
    found = Clients(admin, namespace)
    until(lambda: has_account(found, "default"))
    yield found
    core.delete_namespace(namespace)


def has_account(clients: Clients, name: str) -> bool:
    accounts = clients.core.list_namespaced_service_account(clients.namespace).items
    return name in {one.metadata.name for one in accounts}


@dataclass
class Refusal:
    """The Status body of an error response."""

    code: int
    body: Object

    @property
    def reason(self) -> str:
        return self.body.get("reason", "")

    @property
    def message(self) -> str:
        return self.body["message"]

    @property
    def fields(self) -> list[str]:
        return [one["field"] for one in self.body["details"]["causes"]]


@pytest.fixture
def refusal() -> Callable[..., Refusal]:
    def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Refusal:
        with pytest.raises(client.ApiException) as caught:
            call(*args, **kwargs)
        error: Any = caught.value
        body: Object = json.loads(error.body)
        assert body["kind"] == "Status"
        assert body["status"] == "Failure"
        assert body["code"] == error.status
        return Refusal(error.status, body)

    return refused


@pytest.fixture
def gone(clients: Clients) -> Callable[[Callable[..., Any], str], bool]:
    def is_gone(read: Callable[..., Any], name: str) -> bool:
        try:
            read(name, clients.namespace)
        except client.ApiException as error:
            return error.status == 404
        return False

    return is_gone


def container(**more: Any) -> Object:
    return {"name": "main", "image": "registry.example/none:1", **more}


@pytest.fixture
def pod() -> Callable[..., Object]:
    """A pod that is never scheduled, so that no cluster changes it."""

    def make(name: str, labels: dict[str, str] | None = None, **spec: Any) -> Object:
        return {
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {"schedulerName": "nobody", "containers": [container()], **spec},
        }

    return make


@pytest.fixture
def deployment() -> Callable[..., Object]:
    """A Deployment without pods."""

    def make(name: str, **more: Any) -> Object:
        template = {
            "metadata": {"labels": {"app": name}},
            "spec": {"containers": [container(**more.pop("container", {}))]},
        }
        spec = {"replicas": 0, "selector": {"matchLabels": {"app": name}}, "template": template}
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {**spec, **more},
        }

    return make
