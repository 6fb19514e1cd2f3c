"""ServiceAccounts and the permissions of their Roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client


@pytest.fixture
def worker(clients: Any, until: Any) -> Callable[..., Any]:
    """Clients of a ServiceAccount bound to a Role with these rules."""

    def make(*rules: Any) -> Any:
        namespace = clients.namespace
        clients.core.create_namespaced_service_account(namespace, {"metadata": {"name": "worker"}})
        role = {"metadata": {"name": "worker"}, "rules": list(rules)}
        clients.rbac.create_namespaced_role(namespace, role)
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "worker"}
        subjects = [{"kind": "ServiceAccount", "name": "worker", "namespace": namespace}]
        binding = {"metadata": {"name": "worker"}, "roleRef": reference, "subjects": subjects}
        clients.rbac.create_namespaced_role_binding(namespace, binding)
        asked = clients.core.create_namespaced_service_account_token(
            "worker", namespace, {"spec": {}}
        )
        return type(clients)(bearer(clients.api, asked.status.token), namespace)

    return make


def bearer(api: client.ApiClient, token: str) -> client.ApiClient:
    given: Any = api.configuration
    configuration: Any = client.Configuration()
    configuration.host = given.host
    configuration.ssl_ca_cert = given.ssl_ca_cert
    configuration.api_key = {"authorization": f"Bearer {token}"}
    configuration.api_key = {**configuration.api_key, "BearerToken": f"Bearer {token}"}
    return client.ApiClient(configuration)


def rule(group: str, resources: str, verbs: str, names: str = "") -> Any:
    found = {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}
    return {**found, "resourceNames": names.split()} if names else found


def test_a_role_allows_what_it_lists(clients: Any, worker: Any, refusal: Any) -> None:
    clients.settings("one")
    other = worker(rule("", "configmaps", "get list"))
    assert other.core.read_namespaced_config_map("one", clients.namespace).metadata.uid
    assert other.core.list_namespaced_config_map(clients.namespace).items
    found = refusal(other.settings, "two")
    assert (found.code, found.reason) == (403, "Forbidden")
    user = f"system:serviceaccount:{clients.namespace}:worker"
    assert found.message.startswith(
        f'configmaps is forbidden: User "{user}" cannot create resource "configmaps" '
        f'in API group "" in the namespace "{clients.namespace}"'
    )
    found = refusal(other.core.delete_namespaced_config_map, "one", clients.namespace)
    assert 'configmaps "one" is forbidden' in found.message


def test_a_role_ends_at_its_namespace(clients: Any, worker: Any, refusal: Any) -> None:
    other = worker(rule("", "configmaps", "get list"))
    assert refusal(other.core.list_namespaced_config_map, "default").code == 403
    found = refusal(other.core.list_config_map_for_all_namespaces)
    assert "at the cluster scope" in found.message


def test_names_narrow_a_rule(clients: Any, worker: Any, refusal: Any) -> None:
    clients.settings("one")
    clients.settings("two")
    other = worker(rule("", "configmaps", "get patch delete", "one"))
    read = other.core.read_namespaced_config_map
    assert read("one", clients.namespace).metadata.uid
    assert refusal(read, "two", clients.namespace).code == 403
    assert refusal(other.core.list_namespaced_config_map, clients.namespace).code == 403


def test_doors_are_granted_one_by_one(clients: Any, worker: Any, refusal: Any, pod: Any) -> None:
    clients.core.create_namespaced_pod(clients.namespace, pod("one"))
    other = worker(rule("", "pods/status", "patch"), rule("", "pods/log", "get"))
    place = ("one", clients.namespace)
    other.core.patch_namespaced_pod_status(*place, {"status": {"message": "x"}})
    assert refusal(other.core.patch_namespaced_pod, *place, {}).code == 403
    found = refusal(other.core.read_namespaced_pod, *place)
    assert 'cannot get resource "pods"' in found.message
    assert not other.core.read_namespaced_pod_log(*place)


def test_groups_are_distinguished(clients: Any, worker: Any, refusal: Any, deployment: Any) -> None:
    other = worker(rule("apps", "deployments", "create"))
    made = other.apps.create_namespaced_deployment(clients.namespace, deployment("one"))
    assert made.metadata.uid
    found = refusal(other.apps.patch_namespaced_deployment_scale, "one", clients.namespace, {})
    assert 'resource "deployments/scale" in API group "apps"' in found.message


def test_a_watch_needs_its_verb(clients: Any, worker: Any, refusal: Any) -> None:
    other = worker(rule("", "configmaps", "get list"))
    path = f"/api/v1/namespaces/{clients.namespace}/configmaps"
    found = refusal(other.send, "GET", path, watch="true", timeoutSeconds="1")
    assert "cannot watch resource" in found.message


def test_a_creation_cannot_be_narrowed_by_name(clients: Any, worker: Any, refusal: Any) -> None:
    """The name is in the body, which authorization does not see."""
    other = worker(rule("coordination.k8s.io", "leases", "create get update", "leader"))
    body = {"metadata": {"name": "leader"}, "spec": {}}
    assert refusal(other.leases.create_namespaced_lease, clients.namespace, body).code == 403


def test_an_unknown_token_is_refused(clients: Any, refusal: Any) -> None:
    stranger = type(clients)(bearer(clients.api, "nobody"), clients.namespace)
    found = refusal(stranger.core.list_namespaced_config_map, clients.namespace)
    assert (found.code, found.reason, found.message) == (401, "Unauthorized", "Unauthorized")


def test_a_token_dies_with_its_account(clients: Any, worker: Any, until: Any) -> None:
    other = worker(rule("", "configmaps", "list"))
    clients.core.delete_namespaced_service_account("worker", clients.namespace)

    def refused() -> bool:
        try:
            other.core.list_namespaced_config_map(clients.namespace)
        except client.ApiException as error:
            return error.status == 401
        return False

    until(refused)


def test_access_reviews_of_ones_own_rights_are_allowed(clients: Any, worker: Any) -> None:
    other = worker(rule("", "configmaps", "get"))

    def may(verb: str) -> bool:
        attributes = {"verb": verb, "resource": "configmaps", "namespace": clients.namespace}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return other.send("POST", path, body)["status"]["allowed"]

    assert may("get")
    assert not may("delete")
