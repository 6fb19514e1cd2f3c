"""Field ownership between managers of one object."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubernetes_double.api.policy.ownership import (
    Manager,
    Managers,
    dotted,
    from_fields,
    leaves,
    to_fields,
)
from kubernetes_double.api.requests.apply import apply
from kubernetes_double.api.requests.errors import StatusError
from kubernetes_double.api.resources.kinds import Kinds

KINDS = Kinds()
SETTINGS = KINDS.schema(KINDS.resource("", "v1", "configmaps"))
PODS = KINDS.schema(KINDS.resource("", "v1", "pods"))
DATA = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["1", "2"]))
NAMES = st.sampled_from("abc")
ENV = st.dictionaries(NAMES, st.sampled_from(["1", "2"]), max_size=3)
CONTAINERS = st.dictionaries(NAMES, ENV, min_size=1, max_size=3)


def manager(name: str) -> Manager:
    return Manager(name, "Apply", "v1")


def pod(containers: dict[str, dict[str, str]]) -> Any:
    listed = [
        {"name": name, "env": [{"name": key, "value": value} for key, value in env.items()]}
        for name, env in containers.items()
    ]
    return {"metadata": {}, "spec": {"containers": listed}}


@given(CONTAINERS)
def test_fields_are_written_and_read(containers: Any) -> None:
    paths = frozenset(leaves(PODS, pod(containers)))
    assert from_fields(to_fields(paths)) == paths


@given(DATA, DATA)
def test_a_single_manager_gets_exactly_what_it_wants(first: Any, second: Any) -> None:
    one = manager("one")
    done = apply(SETTINGS, {"metadata": {}}, {"data": first}, one, managers=Managers())
    done = apply(SETTINGS, done.value, {"data": second}, one, managers=done.managers)
    assert done.value.get("data", {}) == second
    again = apply(SETTINGS, done.value, {"data": second}, one, managers=done.managers)
    assert (again.value, again.managers.listed()) == (done.value, done.managers.listed())


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), DATA), max_size=6))
def test_with_force_the_last_word_counts_and_others_parts_stay(turns: Any) -> None:
    value: Any = {"metadata": {}}
    managers = Managers()
    wants: dict[str, dict[str, str]] = {}
    for name, data in turns:
        other = wants.get("two" if name == "one" else "one", {})
        wants[name] = dict(data)
        for key in [k for k in other if k in data and data[k] != other[k]]:
            del other[key]
        done = apply(SETTINGS, value, {"data": data}, manager(name), managers=managers, force=True)
        value, managers = done.value, done.managers
        assert value.get("data", {}) == {**other, **data}


@given(DATA, DATA)
def test_only_different_values_conflict(first: Any, second: Any) -> None:
    done = apply(SETTINGS, {"metadata": {}}, {"data": first}, manager("one"), managers=Managers())
    disputed = {f".data.{key}" for key in first if key in second and first[key] != second[key]}
    two = manager("two")
    if not disputed:
        both = apply(SETTINGS, done.value, {"data": second}, two, managers=done.managers)
        assert both.value.get("data", {}) == {**first, **second}
        return
    with pytest.raises(StatusError) as caught:
        apply(SETTINGS, done.value, {"data": second}, two, managers=done.managers)
    assert {one["field"] for one in caught.value.details["causes"]} == disputed


@given(CONTAINERS, CONTAINERS)
def test_items_of_lists_come_and_go_by_their_key(first: Any, second: Any) -> None:
    one = manager("one")
    done = apply(PODS, {"metadata": {}}, pod(first), one, managers=Managers())
    done = apply(PODS, done.value, pod(second), one, managers=done.managers)
    found = {
        c["name"]: {e["name"]: e["value"] for e in c.get("env", ())}
        for c in done.value["spec"]["containers"]
    }
    assert found == second


def test_paths_are_named_as_people_read_them() -> None:
    path = ("f:spec", "f:containers", 'k:{"name":"c"}', "f:image")
    assert dotted(path) == '.spec.containers[name="c"].image'
    assert dotted(("f:metadata", "f:finalizers", 'v:"x"')) == '.metadata.finalizers[="x"]'
