"""The patch formats: JSON merge patch (RFC 7386), JSON patch (RFC 6902), strategic merge patch."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import jsonpointer

from kubernetes_double.api.requests.errors import StatusError, bad_request
from kubernetes_double.api.resources.schemas import Node, Schema

Object = dict[str, Any]


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result: Object = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def json_patch(target: Object, operations: Any) -> Object:
    """RFC 6902. Raises 422 if an operation or a test fails, 400 if the patch is invalid."""
    if not isinstance(operations, list):
        raise bad_request("a JSON patch is a list of operations")
    try:
        patched: Any = jsonpatch.apply_patch(target, operations)
    except jsonpatch.InvalidJsonPatch as error:
        raise bad_request(f"cannot read the JSON patch: {error}") from error
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException) as error:
        message = f"the server rejected our request due to an error in our request: {error}"
        raise StatusError(422, "Invalid", message) from error
    if not isinstance(patched, dict):
        raise bad_request("the patch does not leave an object")
    return patched


def strategic(schema: Schema, target: Object, patch: Object) -> Object:
    """Strategic merge: lists merge by the merge key that the schema names for them.

    Directives: `$patch: delete|replace|merge`, `$deleteFromPrimitiveList/F`,
    `$setElementOrder/F` (order is kept as merged) and `$retainKeys`.
    """
    return _merge_object(schema, schema.resolve(schema.root), target, patch)


def _merge_object(schema: Schema, node: Node, target: Object, patch: Object) -> Object:
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    if patch.get("$patch") == "delete":
        return {}
    result = dict(target)
    if "$retainKeys" in patch:
        result = {name: v for name, v in result.items() if name in patch["$retainKeys"]}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            _remove_items(result, name.partition("/")[2], value)
        elif name.startswith("$"):
            continue
        elif value is None:
            result.pop(name, None)
        else:
            child = schema.child(node, name) or {}
            result[name] = _merge_value(schema, child, result.get(name), value)
    return result


def _remove_items(result: Object, name: str, values: list[Any]) -> None:
    if name in result:
        result[name] = [one for one in result[name] if one not in values]


def _merge_value(schema: Schema, node: Node, target: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return _merge_object(schema, node, target if isinstance(target, dict) else {}, value)
    strategy = node.get("x-kubernetes-patch-strategy", "")
    if isinstance(value, list) and "merge" in strategy.split(","):
        key = node.get("x-kubernetes-patch-merge-key")
        old = target if isinstance(target, list) else []
        return _merge_items(schema, schema.item(node), old, value, key)
    return copy.deepcopy(value)


def _merge_items(
    schema: Schema, item: Node, target: list[Any], patch: list[Any], key: str | None
) -> list[Any]:
    if key is None:
        return [*target, *(one for one in patch if one not in target)]
    if any(one.get("$patch") == "replace" for one in patch):
        return [one for one in patch if one.get("$patch") != "replace"]
    result = list(target)
    for one in patch:
        at = next((i for i, old in enumerate(result) if old.get(key) == one.get(key)), None)
        if one.get("$patch") == "delete":
            result = [old for old in result if old.get(key) != one.get(key)]
        elif at is None:
            result.append(_merge_object(schema, item, {}, one))
        else:
            result[at] = _merge_object(schema, item, result[at], one)
    return result
