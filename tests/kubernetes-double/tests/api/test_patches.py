"""Merge patches by RFC 7386, and the parts of strategic ones that lists need."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubernetes_double.api.requests.errors import StatusError
from kubernetes_double.api.requests.patches import json_patch, merge, strategic
from kubernetes_double.api.resources.kinds import Kinds

# The test cases of RFC 7386, appendix A: original, patch, result.
RFC_7386: list[tuple[Any, Any, Any]] = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]),
    ({"a": "foo"}, None, None),
    ({"a": "foo"}, "bar", "bar"),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]

SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["x", "y"])
KEYS = st.sampled_from(["a", "b", "c"])
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=8
)
OBJECTS = st.dictionaries(KEYS, JSON)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return value


@pytest.mark.parametrize(("target", "patch", "result"), RFC_7386)
def test_the_examples_of_the_rfc(target: Any, patch: Any, result: Any) -> None:
    assert merge(target, patch) == result


@given(OBJECTS, OBJECTS)
def test_patches_are_idempotent(target: Any, patch: Any) -> None:
    once = merge(target, patch)
    assert merge(once, patch) == once


@given(OBJECTS, OBJECTS)
def test_neither_side_is_changed(target: Any, patch: Any) -> None:
    before = copy.deepcopy((target, patch))
    merge(target, patch)
    assert (target, patch) == before


@given(OBJECTS)
def test_onto_nothing_a_patch_gives_itself_without_nulls(patch: Any) -> None:
    assert merge({}, patch) == without_nulls(patch)


@given(OBJECTS)
def test_an_empty_patch_changes_nothing(target: Any) -> None:
    assert merge(target, {}) == target


def patched(kinds: Kinds, target: Any, patch: Any) -> Any:
    schema = kinds.schema(kinds.resource("", "v1", "pods"))
    return strategic(schema, {"spec": target}, {"spec": patch})["spec"]


def test_lists_with_a_key_merge_and_others_are_replaced(kinds: Kinds) -> None:
    target = {
        "containers": [{"name": "a", "args": ["1"], "ports": [{"containerPort": 1}]}],
        "tolerations": [{"key": "x"}],
    }
    change = {
        "containers": [{"name": "a", "args": ["2"], "ports": [{"containerPort": 2}]}],
        "tolerations": [{"key": "y"}],
    }
    found = patched(kinds, target, change)
    (main,) = found["containers"]
    assert main["args"] == ["2"]
    assert [one["containerPort"] for one in main["ports"]] == [1, 2]
    assert found["tolerations"] == [{"key": "y"}]


def test_directives_delete_and_replace(kinds: Kinds) -> None:
    target = {
        "containers": [{"name": "a"}, {"name": "b"}],
        "nodeSelector": {"x": "1"},
        "volumes": [{"name": "v", "emptyDir": {}}],
    }
    delete = {"containers": [{"name": "a", "$patch": "delete"}]}
    assert patched(kinds, target, delete)["containers"] == [{"name": "b"}]
    replace = {"containers": [{"$patch": "replace"}, {"name": "c"}]}
    assert patched(kinds, target, replace)["containers"] == [{"name": "c"}]
    whole = {"nodeSelector": {"$patch": "replace", "y": "2"}}
    assert patched(kinds, target, whole)["nodeSelector"] == {"y": "2"}
    change = {"volumes": [{"name": "v", "$retainKeys": ["name", "secret"], "secret": {}}]}
    assert patched(kinds, target, change)["volumes"] == [{"name": "v", "secret": {}}]


def test_finalizers_are_added_and_taken_by_value(kinds: Kinds) -> None:
    schema = kinds.schema(kinds.resource("", "v1", "pods"))
    target = {"metadata": {"finalizers": ["a", "b"]}}
    change = {"metadata": {"finalizers": ["c"], "$deleteFromPrimitiveList/finalizers": ["a"]}}
    found = strategic(schema, target, change)["metadata"]["finalizers"]
    assert sorted(found) == ["b", "c"]


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ({"op": "add"}, 400),
        ([{"op": "leap", "path": "/a", "value": 1}], 400),
        ([{"op": "remove", "path": "/none"}], 422),
        ([{"op": "test", "path": "/a", "value": 2}], 422),
        ([{"op": "replace", "path": "", "value": [1]}], 400),
    ],
)
def test_wrong_json_patches_are_refused(steps: Any, code: int) -> None:
    with pytest.raises(StatusError) as caught:
        json_patch({"a": 1}, steps)
    assert caught.value.code == code
