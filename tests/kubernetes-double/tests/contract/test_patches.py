"""Merge, strategic merge and JSON patches."""

from __future__ import annotations

from typing import Any

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


def patch(clients: Any, api_version: str, kind: str, body: Any, media: str) -> Any:
    found = clients.kind(api_version, kind)
    return found.patch(body, name="one", namespace=clients.namespace, content_type=media).to_dict()


def test_null_removes(clients: Any) -> None:
    clients.settings("one", data={"a": "1", "b": "2"})
    found = patch(clients, "v1", "ConfigMap", {"data": {"a": None, "c": "3"}}, MERGE)
    assert found["data"] == {"b": "2", "c": "3"}


def test_merge_patches_replace_lists_and_strategic_ones_merge_them(
    clients: Any, deployment: Any
) -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    body = deployment("one", container={"env": env})
    clients.apps.create_namespaced_deployment(clients.namespace, body)
    change = {"name": "main", "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]}
    template = {"spec": {"template": {"spec": {"containers": [change]}}}}
    found = patch(clients, "apps/v1", "Deployment", template, STRATEGIC)
    (main,) = found["spec"]["template"]["spec"]["containers"]
    assert main["image"] == body["spec"]["template"]["spec"]["containers"][0]["image"]
    assert {one["name"]: one["value"] for one in main["env"]} == {"A": "1", "B": "3", "C": "4"}
    remove = {"name": "main", "env": [{"name": "A", "$patch": "delete"}]}
    template = {"spec": {"template": {"spec": {"containers": [remove]}}}}
    found = patch(clients, "apps/v1", "Deployment", template, STRATEGIC)
    (main,) = found["spec"]["template"]["spec"]["containers"]
    assert [one["name"] for one in main["env"]] == ["B", "C"]
    whole = [{"name": "main", "image": "other:1"}]
    template = {"spec": {"template": {"spec": {"containers": whole}}}}
    found = patch(clients, "apps/v1", "Deployment", template, MERGE)
    (main,) = found["spec"]["template"]["spec"]["containers"]
    assert "env" not in main


def test_json_patches_test_before_they_write(clients: Any, refusal: Any) -> None:
    clients.settings("one", data={"a": "1"})
    steps = [
        {"op": "test", "path": "/data/a", "value": "1"},
        {"op": "replace", "path": "/data/a", "value": "2"},
        {"op": "add", "path": "/data/b", "value": "3"},
    ]
    assert patch(clients, "v1", "ConfigMap", steps, JSON)["data"] == {"a": "2", "b": "3"}
    found = refusal(patch, clients, "v1", "ConfigMap", steps, JSON)
    assert (found.code, found.reason) == (422, "Invalid")


def test_a_patch_may_insist_on_a_revision(clients: Any, refusal: Any) -> None:
    first = clients.settings("one", data={"a": "1"})
    version = {"metadata": {"resourceVersion": first.metadata.resource_version}}
    patch(clients, "v1", "ConfigMap", {"data": {"a": "2"}, **version}, MERGE)
    found = refusal(patch, clients, "v1", "ConfigMap", {"data": {"a": "3"}, **version}, MERGE)
    assert (found.code, found.reason) == (409, "Conflict")


def test_a_patch_needs_an_object(clients: Any, refusal: Any) -> None:
    found = refusal(patch, clients, "v1", "ConfigMap", {"data": {}}, MERGE)
    assert (found.code, found.reason) == (404, "NotFound")
