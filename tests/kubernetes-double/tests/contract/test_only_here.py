"""Features of the double's server only: expiring history, acting as kubelet, recorded requests."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from kubernetes_double.api import Access, ApiServer, Visit
from kubernetes_double.errors import NotFoundError
from kubernetes_double.patience import PATIENCE_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(folder=tmp_path_factory.mktemp("here"), bookmark_s=0.2) as found:
        yield found


@pytest.fixture(scope="module")
def kubeconfig(server: ApiServer) -> Path:
    return server.kubeconfig


@pytest.fixture(scope="module")
def admin(kubeconfig: Path) -> client.ApiClient:
    return config.new_client_from_config(str(kubeconfig))


def lines(clients: Any, **query: str) -> list[Any]:
    """The raw events of a one-second watch."""
    path = f"/api/v1/namespaces/{clients.namespace}/configmaps"
    query = {"watch": "1", "timeoutSeconds": "1", **query}
    request = clients.api.param_serialize(
        "GET", path, query_params=list(query.items()), auth_settings=["BearerToken"]
    )
    answer: Any = clients.api.call_api(*request)
    answer.read()
    assert answer.status == 200
    return [json.loads(line) for line in answer.data.splitlines()]


def test_forgotten_history_is_gone(server: ApiServer, clients: Any, refusal: Any) -> None:
    clients.settings("one")
    first = clients.core.list_namespaced_config_map(clients.namespace, limit=1)
    start = first.metadata.resource_version
    clients.settings("two")
    server.expire_history()
    (event,) = lines(clients, resourceVersion=start)
    assert event["type"] == "ERROR"
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")
    listing = clients.core.list_namespaced_config_map
    found = refusal(listing, clients.namespace, limit=1, _continue=first.metadata._continue)
    assert (found.code, found.reason) == (410, "Expired")
    fresh = listing(clients.namespace).metadata.resource_version
    assert lines(clients, resourceVersion=fresh) == []


def test_bookmarks_carry_the_revision_of_a_watch(clients: Any) -> None:
    made = clients.settings("one")
    start = made.metadata.resource_version
    clients.core.create_namespaced_secret(clients.namespace, {"metadata": {"name": "elsewhere"}})
    found = lines(clients, resourceVersion=start, allowWatchBookmarks="true")
    assert {one["type"] for one in found} == {"BOOKMARK"}
    assert int(found[-1]["object"]["metadata"]["resourceVersion"]) > int(start)
    initial = lines(clients, allowWatchBookmarks="true", sendInitialEvents="true")
    kinds = [one["type"] for one in initial]
    assert kinds[: kinds.index("BOOKMARK")] == ["ADDED"] * kinds.index("BOOKMARK")
    marked = initial[kinds.index("BOOKMARK")]["object"]["metadata"]
    assert marked["annotations"] == {"k8s.io/initial-events-end": "true"}


@pytest.fixture
def running(clients: Any, pod: Any) -> Any:
    """Makes pods that a kubelet has made ready."""

    def make(name: str, labels: dict[str, str] | None = None, node: str = "node") -> Any:
        clients.core.create_namespaced_pod(clients.namespace, pod(name, labels))
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        path = f"/api/v1/namespaces/{clients.namespace}/pods/{name}/binding"
        clients.send("POST", path, {"metadata": {"name": name}, "target": target})
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "conditions": [ready]}
        return clients.core.patch_namespaced_pod_status(name, clients.namespace, {"status": status})

    return make


def test_a_running_pod_waits_for_its_kubelet(clients: Any, running: Any, gone: Any) -> None:
    assert running("one").spec.node_name == "node"
    clients.core.delete_namespaced_pod("one", clients.namespace)
    marked = clients.core.read_namespaced_pod("one", clients.namespace)
    assert marked.metadata.deletion_grace_period_seconds == 30
    assert marked.metadata.deletion_timestamp > marked.metadata.creation_timestamp
    clients.core.delete_namespaced_pod("one", clients.namespace, grace_period_seconds=5)
    marked = clients.core.read_namespaced_pod("one", clients.namespace)
    assert marked.metadata.deletion_grace_period_seconds == 5
    clients.core.delete_namespaced_pod("one", clients.namespace, grace_period_seconds=0)
    assert gone(clients.core.read_namespaced_pod, "one")


def test_a_pod_is_bound_once(clients: Any, running: Any, refusal: Any) -> None:
    running("one")
    path = f"/api/v1/namespaces/{clients.namespace}/pods/one/binding"
    found = refusal(clients.send, "POST", path, {"target": {"name": "other"}})
    assert (found.code, found.reason) == (409, "Conflict")


def test_a_budget_holds_evictions_back(clients: Any, running: Any, refusal: Any) -> None:
    labels = {"app": "x"}
    for name in ("one", "two"):
        running(name, labels)
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "most"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
    }
    clients.kind("policy/v1", "PodDisruptionBudget").create(budget, namespace=clients.namespace)
    evict = clients.core.create_namespaced_pod_eviction

    def body(name: str) -> Any:
        return {"metadata": {"name": name, "namespace": clients.namespace}}

    evict("one", clients.namespace, body("one"))
    found = refusal(evict, "two", clients.namespace, body("two"))
    assert (found.code, found.reason) == (429, "TooManyRequests")
    assert found.message == "Cannot evict pod as it would violate the pod's disruption budget."


class Kubelet(BaseHTTPRequestHandler):
    """Answers with its own path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.path}\nlast\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the output of the tests clean."""


def test_logs_come_from_the_kubelet(clients: Any, running: Any) -> None:
    kubelet = ThreadingHTTPServer(("127.0.0.1", 0), Kubelet)
    threading.Thread(target=kubelet.serve_forever, daemon=True).start()
    clients.core.create_node({"metadata": {"name": "with-kubelet"}})
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.server_port}},
    }
    clients.core.patch_node_status("with-kubelet", {"status": status})
    running("one", node="with-kubelet")
    text = clients.core.read_namespaced_pod_log("one", clients.namespace, tail_lines=3)
    assert text == f"/containerLogs/{clients.namespace}/one/main?tailLines=3\nlast\n"
    kubelet.shutdown()
    kubelet.server_close()


def test_a_log_without_a_kubelet_fails(clients: Any, running: Any, refusal: Any) -> None:
    running("one", node="unknown")
    found = refusal(clients.core.read_namespaced_pod_log, "one", clients.namespace)
    assert (found.code, found.reason) == (500, "InternalError")


def test_requests_are_listed_by_identity(server: ApiServer, clients: Any, refusal: Any) -> None:
    path = server.kubeconfig_for(clients.namespace, "default")
    other = client.CoreV1Api(config.new_client_from_config(str(path)))
    refusal(other.read_namespaced_pod_log, "one", clients.namespace)
    user = f"system:serviceaccount:{clients.namespace}:default"
    access = Access("get", "", "pods", "log", clients.namespace, "one")
    assert server.visits_of(user) == [Visit(user, access, allowed=False)]
    with pytest.raises(NotFoundError, match="nobody"):
        server.token_for(clients.namespace, "nobody")


def test_a_further_socket_serves_the_same(server: ApiServer, clients: Any) -> None:
    clients.settings("one")
    listener = socket.create_server(("127.0.0.1", 0))
    server.listen(listener)
    configuration: Any = client.Configuration.get_default_copy()
    config.load_kube_config(str(server.kubeconfig), client_configuration=configuration)
    configuration.host = f"https://127.0.0.1:{listener.getsockname()[1]}"
    core = client.CoreV1Api(client.ApiClient(configuration))
    found: Any = core.read_namespaced_config_map("one", clients.namespace)
    assert found.metadata.name == "one"


def test_it_runs_as_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kubernetes_double.api", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        kubeconfig = Path(process.stdout.readline().strip())
        core: Any = client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
        assert "default" in {one.metadata.name for one in core.list_namespace().items}
        assert kubeconfig.stat().st_mode & 0o077 == 0
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_health_needs_no_token(server: ApiServer, tmp_path: Path) -> None:
    authority = ssl.create_default_context(cadata=server.authority.certificate)
    with urllib.request.urlopen(
        f"{server.url}/readyz", timeout=PATIENCE_S, context=authority
    ) as answer:
        assert answer.read() == b"ok"
