"""Server-side apply: several managers of one object."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def apply(clients: Any) -> Any:
    def run(manager: str, body: Any, *, force: bool = False) -> Any:
        kind = clients.kind(body["apiVersion"], body["kind"])
        found = kind.server_side_apply(
            body, namespace=clients.namespace, field_manager=manager, force_conflicts=force
        )
        return found.to_dict()

    return run


def settings(**data: str) -> Any:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}, "data": data}


def test_apply_creates_and_is_idempotent(apply: Any) -> None:
    first = apply("one", settings(a="1"))
    again = apply("one", settings(a="1"))
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    (entry,) = again["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("one", "Apply")
    assert entry["fieldsV1"] == {"f:data": {"f:a": {}}}


def test_what_is_applied_no_longer_goes(apply: Any) -> None:
    apply("one", settings(a="1", b="2"))
    assert apply("one", settings(b="2"))["data"] == {"b": "2"}


def test_managers_own_their_parts(apply: Any) -> None:
    apply("one", settings(a="1"))
    assert apply("two", settings(b="2"))["data"] == {"a": "1", "b": "2"}
    assert apply("one", settings(c="3"))["data"] == {"b": "2", "c": "3"}


def test_other_managers_fields_conflict_unless_forced(apply: Any, refusal: Any) -> None:
    apply("one", settings(a="1"))
    found = refusal(apply, "two", settings(a="2"))
    assert (found.code, found.reason) == (409, "Conflict")
    assert found.fields == [".data.a"]
    assert found.message == 'Apply failed with 1 conflict: conflict with "one": .data.a'
    forced = apply("two", settings(a="2"), force=True)
    assert forced["data"] == {"a": "2"}
    assert [one["manager"] for one in forced["metadata"]["managedFields"]] == ["two"]
    assert refusal(apply, "one", settings(a="1")).code == 409


def test_agreed_values_are_owned_together(apply: Any) -> None:
    apply("one", settings(a="1"))
    both = apply("two", settings(a="1"))
    assert len(both["metadata"]["managedFields"]) == 2
    assert apply("one", settings(b="2"))["data"] == {"a": "1", "b": "2"}
    assert "a" not in apply("two", settings(c="3"))["data"]


def test_updates_take_fields_over(clients: Any, apply: Any, refusal: Any) -> None:
    apply("one", settings(a="1", b="2"))
    clients.core.patch_namespaced_config_map(
        "one", clients.namespace, {"data": {"a": "3"}}, field_manager="editor"
    )
    found = refusal(apply, "one", settings(a="1", b="2"))
    assert found.fields == [".data.a"]
    assert 'conflict with "editor" using v1: .data.a' in found.message
    assert apply("one", settings(b="2"))["data"] == {"a": "3", "b": "2"}


def test_items_of_lists_are_owned_one_by_one(apply: Any, deployment: Any) -> None:
    def env(**values: str) -> Any:
        return {"env": [{"name": name, "value": value} for name, value in values.items()]}

    def main(found: Any) -> Any:
        return found["spec"]["template"]["spec"]["containers"][0]

    probe = {"readinessProbe": {"tcpSocket": {"port": 80}}}
    apply("one", deployment("one", container={**env(A="1", B="2"), **probe}))
    other = deployment("one", container=env(C="3"))
    del other["spec"]["replicas"]
    both = main(apply("two", other))
    assert {one["name"] for one in both["env"]} == {"A", "B", "C"}
    assert both["readinessProbe"]["periodSeconds"] == 10
    left = main(apply("one", deployment("one", container=env(B="4"))))
    assert {one["name"]: one["value"] for one in left["env"]} == {"B": "4", "C": "3"}
    assert "readinessProbe" not in left


def test_a_scaler_and_an_owner_share_a_workload(apply: Any, clients: Any, deployment: Any) -> None:
    body = deployment("one", paused=True)
    del body["spec"]["replicas"]
    apply("owner", body)
    clients.apps.patch_namespaced_deployment_scale(
        "one", clients.namespace, {"spec": {"replicas": 2}}, field_manager="scaler"
    )
    assert apply("owner", {**body})["spec"]["replicas"] == 2


def test_status_is_applied_at_its_own_door(clients: Any, pod: Any, refusal: Any) -> None:
    clients.core.create_namespaced_pod(clients.namespace, pod("one"))
    pods = clients.kind("v1", "Pod")
    condition = {"type": "double.example/Ready", "status": "True"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one"},
        "status": {"conditions": [condition]},
    }
    found = pods.status.server_side_apply(
        body, name="one", namespace=clients.namespace, field_manager="kubelet"
    ).to_dict()
    kinds = {one["type"] for one in found["status"]["conditions"]}
    assert "double.example/Ready" in kinds
    (entry,) = [m for m in found["metadata"]["managedFields"] if m["manager"] == "kubelet"]
    assert entry["subresource"] == "status"


def test_an_apply_names_its_manager(clients: Any, refusal: Any) -> None:
    clients.settings("one")
    path = f"/api/v1/namespaces/{clients.namespace}/configmaps/one"
    media = "application/apply-patch+yaml"
    found = refusal(clients.send, "PATCH", path, settings(a="1"), media=media)
    assert (found.code, found.reason) == (422, "Invalid")


def job(**container: Any) -> Any:
    main = {"name": "main", "image": "none:1", **container}
    template = {"spec": {"restartPolicy": "Never", "containers": [main]}}
    spec = {"suspend": True, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": spec}


MAIN = '.spec.template.spec.containers[name="main"]'
MISFITS: Any = {
    f'{MAIN}.env[name="A"].value: expected string, got &value.valueUnstructured{{Value:1}}': {
        "env": [{"name": "A", "value": 1}]
    },
    f'{MAIN}.env: duplicate entries for key [name="A"]': {
        "env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    },
    f"{MAIN}.volume: field not declared in schema": {"volume": "x"},
    f"{MAIN}.command: expected list, got &{{python}}": {"command": "python"},
    f"{MAIN}.resources: expected map, got &{{[1]}}": {"resources": [1]},
    f"{MAIN}.tty: expected boolean, got &{{yes}}": {"tty": "yes"},
    f"{MAIN}.livenessProbe.periodSeconds: expected numeric (int or float), got string": {
        "livenessProbe": {"periodSeconds": "5", "tcpSocket": {"port": 80}}
    },
    "quantities must match the regular expression": {"resources": {"requests": {"cpu": "many"}}},
}


@pytest.mark.parametrize(("text", "container"), MISFITS.items(), ids=range(len(MISFITS)))
def test_what_does_not_fit_the_schema_is_answered_without_a_reason(
    clients: Any, refusal: Any, text: str, container: Any
) -> None:
    """The server returns 500 without a reason: only the message tells what is wrong."""
    path = f"/apis/batch/v1/namespaces/{clients.namespace}/jobs/one"
    query = {"fieldManager": "one", "force": "true", "media": "application/apply-patch+yaml"}
    body = job(**container)
    body["metadata"]["namespace"] = clients.namespace
    found = refusal(clients.send, "PATCH", path, body, **query)
    assert (found.code, found.reason) == (500, "")
    assert "details" not in found.body
    what = "create typed patch object" if text.startswith(".") else "convert new object"
    title = f"({clients.namespace}/one; batch/v1, Kind=Job)"
    assert found.message.startswith(f"failed to {what} {title}")
    assert text in found.message


def test_defaults_name_items_of_lists(clients: Any, refusal: Any, apply: Any) -> None:
    ports = [{"port": 80, "name": "a"}, {"port": 80, "name": "b", "protocol": "TCP"}]
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "one"}}
    found = refusal(apply, "one", {**body, "spec": {"ports": ports}})
    assert found.code == 500
    key = '.spec.ports: duplicate entries for key [port=80,protocol="TCP"]'
    assert found.message.endswith(f"Kind=Service): {key}")
