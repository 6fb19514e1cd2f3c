"""Pods, as far as possible without a kubelet."""

from __future__ import annotations

from typing import Any


def test_a_pod_gets_what_admission_adds(clients: Any, pod: Any) -> None:
    made = clients.core.create_namespaced_pod(clients.namespace, pod("one"))
    assert made.status.phase == "Pending"
    assert made.spec.service_account_name == "default"
    assert made.spec.restart_policy == "Always"
    assert made.spec.termination_grace_period_seconds == 30
    (main,) = made.spec.containers
    (mount,) = main.volume_mounts
    assert mount.mount_path == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert mount.name in {one.name for one in made.spec.volumes}
    bare = pod("two", automountServiceAccountToken=False)
    assert not clients.core.create_namespaced_pod(clients.namespace, bare).spec.volumes


def test_a_pod_needs_its_account(clients: Any, refusal: Any, pod: Any) -> None:
    body = pod("one", serviceAccountName="nobody")
    found = refusal(clients.core.create_namespaced_pod, clients.namespace, body)
    assert (found.code, found.reason) == (403, "Forbidden")
    assert 'serviceaccount "nobody" not found' in found.message


def test_a_pod_keeps_its_shape(clients: Any, refusal: Any, pod: Any) -> None:
    clients.core.create_namespaced_pod(clients.namespace, pod("one"))
    place = ("one", clients.namespace)
    image = {"spec": {"containers": [{"name": "main", "image": "other:2"}]}}
    changed = clients.core.patch_namespaced_pod(*place, image)
    assert changed.spec.containers[0].image == "other:2"
    command = {"spec": {"containers": [{"name": "main", "command": ["other"]}]}}
    found = refusal(clients.core.patch_namespaced_pod, *place, command)
    assert (found.code, found.reason) == (422, "Invalid")
    assert "pod updates may not change fields other than" in found.message


def test_a_pod_without_a_node_is_removed_immediately(clients: Any, pod: Any, gone: Any) -> None:
    clients.core.create_namespaced_pod(clients.namespace, pod("one"))
    clients.core.delete_namespaced_pod("one", clients.namespace)
    assert gone(clients.core.read_namespaced_pod, "one")


def test_a_pending_pod_is_evicted(clients: Any, refusal: Any, pod: Any, gone: Any) -> None:
    clients.core.create_namespaced_pod(clients.namespace, pod("one"))
    evict = clients.core.create_namespaced_pod_eviction
    place = {"name": "one", "namespace": clients.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": place}
    evict("one", clients.namespace, body)
    assert gone(clients.core.read_namespaced_pod, "one")
    assert refusal(evict, "one", clients.namespace, body).code == 404


def test_a_log_needs_a_container_and_is_empty_without_a_host(
    clients: Any, refusal: Any, pod: Any
) -> None:
    log = clients.core.read_namespaced_pod_log
    clients.core.create_namespaced_pod(clients.namespace, pod("one"))
    path = f"/api/v1/namespaces/{clients.namespace}/pods/one/log"
    request = clients.api.param_serialize("GET", path, auth_settings=["BearerToken"])
    answer = clients.api.call_api(*request)
    answer.read()
    assert (answer.status, answer.data) == (204, b"")
    found = refusal(log, "one", clients.namespace, container="none")
    assert (found.code, found.message) == (400, "container none is not valid for pod one")
    two = [{"name": name, "image": "n:1"} for name in ("a", "b")]
    clients.core.create_namespaced_pod(clients.namespace, pod("two", containers=two))
    found = refusal(log, "two", clients.namespace)
    assert found.message.startswith("a container name must be specified for pod two")
