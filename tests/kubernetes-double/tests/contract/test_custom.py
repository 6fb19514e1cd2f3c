"""Custom resource definitions: schemas, CEL rules, immutability, status, columns."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

STATE = {
    "type": "object",
    "properties": {"state": {"type": "string"}, "step": {"type": "integer"}},
}
SPEC = {
    "type": "object",
    "required": ["workers"],
    "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "spec is immutable"}],
    "properties": {
        "workers": {
            "type": "integer",
            "minimum": 1,
            "x-kubernetes-validations": [{"rule": "self <= 64", "message": "at most 64 workers"}],
        },
        "mode": {"type": "string", "default": "fast", "enum": ["fast", "exact"]},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "low": {"type": "integer"},
        "high": {"type": "integer"},
        "wide": {"type": "integer", "format": "int64", "minimum": -(2**63)},
        "exact": {"type": "integer", "format": "int64", "minimum": -(2**53), "maximum": 2**53},
    },
}
BETWEEN = {
    "rule": "!has(self.spec.low) || !has(self.spec.high) || self.spec.low <= self.spec.high",
    # Of known size: the server estimates what a message may cost.
    "messageExpression": "self.spec.low < 10 ? 'low is above high' : 'low is far above high'",
}


def definition(group: str) -> Any:
    schema = {
        "type": "object",
        "required": ["spec"],
        "x-kubernetes-validations": [BETWEEN],
        "properties": {"spec": SPEC, "status": STATE},
    }
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": [
            {"name": "State", "type": "string", "jsonPath": ".status.state"},
            {"name": "Workers", "type": "integer", "jsonPath": ".spec.workers", "priority": 1},
        ],
    }
    return {
        "metadata": {"name": f"trials.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": "trials", "singular": "trial", "kind": "Trial"},
            "versions": [version],
        },
    }


@pytest.fixture
def trials(clients: Any, until: Any) -> Iterator[Any]:
    group = f"c{uuid.uuid4().hex[:8]}.double.example"
    clients.definitions.create_custom_resource_definition(definition(group))
    name = f"trials.{group}"

    def established() -> bool:
        found = clients.definitions.read_custom_resource_definition(name)
        conditions = found.status.conditions if found.status else None
        return any(c.type == "Established" and c.status == "True" for c in conditions or ())

    until(established)
    yield Trials(clients, group)
    clients.definitions.delete_custom_resource_definition(name)


class Trials:
    def __init__(self, clients: Any, group: str) -> None:
        self.clients = clients
        self.place = (group, "v1alpha1", clients.namespace, "trials")
        self.group = group

    def make(self, name: str = "one", **spec: Any) -> Any:
        body = {
            "apiVersion": f"{self.group}/v1alpha1",
            "kind": "Trial",
            "metadata": {"name": name},
            "spec": {"workers": 1, **spec},
            "status": {"state": "ignored"},
        }
        return self.clients.custom.create_namespaced_custom_object(*self.place, body)

    def patch(self, body: Any, door: str = "") -> Any:
        custom = self.clients.custom
        method = f"patch_namespaced_custom_object{'_status' if door else ''}"
        return getattr(custom, method)(*self.place, "one", body)


def test_defaults_come_and_unknown_fields_go(trials: Any) -> None:
    made = trials.make(extra=1, free={"anything": {"goes": 1}})
    assert made["spec"] == {"workers": 1, "mode": "fast", "free": {"anything": {"goes": 1}}}
    assert made["metadata"]["generation"] == 1
    assert "status" not in made


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"workers": "many"}, "spec.workers"),
        ({"workers": 0}, "spec.workers"),
        ({"workers": 65}, "spec.workers"),
        ({"mode": "slow"}, "spec.mode"),
    ],
)
def test_wrong_values_are_invalid(trials: Any, refusal: Any, spec: Any, field: str) -> None:
    found = refusal(trials.make, **spec)
    assert (found.code, found.reason) == (422, "Invalid")
    assert field in found.fields


def test_a_value_of_another_type_is_named_with_both(trials: Any, refusal: Any) -> None:
    text = 'spec.workers: Invalid value: "string": spec.workers in body must be of type integer'
    assert text in refusal(trials.make, workers="many").message


def test_a_bound_that_float64_makes_no_int64_refuses_every_value(trials: Any, refusal: Any) -> None:
    found = refusal(trials.make, wide=0)
    assert (found.code, found.reason) == (422, "Invalid")
    text = "Minimum boundary value must be of type integer with format int64 in spec.wide"
    assert text in found.message
    assert trials.make(exact=2**53)["spec"]["exact"] == 2**53


def test_rules_see_the_whole_object_and_their_messages_are_returned(
    trials: Any, refusal: Any
) -> None:
    assert "low is above high" in refusal(trials.make, low=5, high=4).message
    assert "at most 64 workers" in refusal(trials.make, workers=65).message
    trials.make(low=4, high=4)


def test_the_wish_is_immutable_and_the_rest_is_not(trials: Any, refusal: Any) -> None:
    trials.make()
    found = refusal(trials.patch, {"spec": {"workers": 2}})
    assert (found.code, found.fields) == (422, ["spec"])
    assert "spec is immutable" in found.message
    labelled = trials.patch({"metadata": {"labels": {"a": "b"}}})
    assert labelled["metadata"]["labels"] == {"a": "b"}
    assert labelled["metadata"]["generation"] == 1


def test_status_is_written_through_its_subresource_only(trials: Any, refusal: Any) -> None:
    trials.make()
    assert "status" not in trials.patch({"status": {"state": "no"}})
    told = trials.patch({"status": {"state": "RUNNING"}, "spec": {"workers": 9}}, "status")
    assert told["status"] == {"state": "RUNNING"}
    assert told["spec"]["workers"] == 1
    assert told["metadata"]["generation"] == 1
    assert refusal(trials.patch, {"status": {"step": "x"}}, "status").code == 422


def test_updates_name_a_revision(trials: Any, refusal: Any) -> None:
    made = trials.make()
    replace = trials.clients.custom.replace_namespaced_custom_object
    stale = {**made, "metadata": {**made["metadata"]}}
    made["metadata"]["labels"] = {"a": "b"}
    replace(*trials.place, "one", made)
    assert refusal(replace, *trials.place, "one", stale).code == 409
    del stale["metadata"]["resourceVersion"]
    assert refusal(replace, *trials.place, "one", stale).code == 422


def test_columns_are_printed(trials: Any) -> None:
    trials.make(workers=3)
    trials.patch({"status": {"state": "RUNNING"}}, "status")
    path = f"/apis/{trials.group}/v1alpha1/namespaces/{trials.clients.namespace}/trials"
    table = trials.clients.send("GET", path, accept="application/json;as=Table;g=meta.k8s.io;v=v1")
    assert table["kind"] == "Table"
    assert [one["name"] for one in table["columnDefinitions"]] == ["Name", "State", "Workers"]
    assert [one["priority"] for one in table["columnDefinitions"]] == [0, 0, 1]
    assert table["rows"][0]["cells"] == ["one", "RUNNING", 3]


def test_objects_go_with_their_definition(trials: Any, until: Any) -> None:
    trials.make()
    name = f"trials.{trials.group}"
    definitions = trials.clients.definitions
    body = definition(trials.group)
    definitions.delete_custom_resource_definition(name)
    listed = definitions.list_custom_resource_definition
    until(lambda: name not in {one.metadata.name for one in listed().items})
    until(lambda: definitions.create_custom_resource_definition(body))
    listing = trials.clients.custom.list_namespaced_custom_object

    def items() -> Any:
        try:
            return [listing(*trials.place)["items"]]
        except client.ApiException:
            return None

    assert until(items) == [[]]


def test_a_definition_with_a_broken_rule_is_refused(clients: Any, refusal: Any) -> None:
    body = definition("broken.double.example")
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["x-kubernetes-validations"] = [{"rule": "self.spec.workers <="}]
    found = refusal(clients.definitions.create_custom_resource_definition, body)
    assert (found.code, found.reason) == (422, "Invalid")
    assert "compilation failed" in found.message


def test_a_definition_with_unbounded_messages_is_refused(clients: Any, refusal: Any) -> None:
    body = definition("dear.double.example")
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    dear = "'low ' + string(self.spec.low) + ' is above high'"
    schema["x-kubernetes-validations"] = [{**BETWEEN, "messageExpression": dear}]
    found = refusal(clients.definitions.create_custom_resource_definition, body)
    assert (found.code, found.reason) == (422, "Invalid")
    assert "estimated messageExpression cost exceeds budget" in found.message


def dear(rule: str, **bounds: int) -> Any:
    body = definition("dear.double.example")
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    words = {"type": "string", **bounds}
    schema["properties"]["spec"] = {"type": "object", "properties": {"words": words}}
    schema["x-kubernetes-validations"] = [{"rule": rule}]
    return body


def test_a_definition_with_too_expensive_rules_is_refused(clients: Any, refusal: Any) -> None:
    create = clients.definitions.create_custom_resource_definition
    rule = f"self.spec.words.matches('{'a' * 128}')"
    found = refusal(create, dear(rule))
    place = "spec.validation.openAPIV3Schema.x-kubernetes-validations[0].rule"
    assert (found.code, found.reason, found.fields) == (422, "Invalid", [place])
    assert f"{place}: Forbidden: estimated rule cost exceeds budget by factor of" in found.message
    bounded = dear(rule, maxLength=1000)
    create(bounded)
    clients.definitions.delete_custom_resource_definition(bounded["metadata"]["name"])


def test_a_definition_with_too_many_rules_is_refused(clients: Any, refusal: Any) -> None:
    body = dear("")
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rule = {"rule": f"self.spec.words.matches('{'a' * 100}')"}
    schema["x-kubernetes-validations"] = [rule] * 13
    found = refusal(clients.definitions.create_custom_resource_definition, body)
    assert (found.code, found.reason) == (422, "Invalid")
    assert (
        "spec.validation.openAPIV3Schema: Forbidden: x-kubernetes-validations estimated rule cost "
        "total for entire OpenAPIv3 schema exceeds budget by factor of 1.0"
    ) in found.message
