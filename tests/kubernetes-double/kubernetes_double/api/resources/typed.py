"""Schema checks before a server-side apply.

The traversal, its order and the wording are those of structured-merge-diff (`typed/validate.go`),
wrapped as in apimachinery's `structuredmerge.go`. The real server does not treat these as client
errors: they are 500 without a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kubernetes_double.api.policy.ownership import KEY_DEFAULTS
from kubernetes_double.api.requests.errors import unexpected
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.resources.schemas import Node, Schema

Object = dict[str, Any]
QUANTITY = r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"
_QUANTITY = re.compile(QUANTITY)
_NAMED_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_SCALARS = {"string": str, "boolean": bool, "integer": (int, float), "number": (int, float)}


def check_patch(schema: Schema, resource: Resource, body: Object) -> None:
    """Raise the real server's 500 if the body of an apply does not match its schema."""
    found = list(_walk(schema, schema.resolve(schema.root), body, ""))
    if found:
        raise unexpected(
            f"failed to create typed patch object ({_title(resource, body)}): " + _text(found)
        )
    wrong = next(_unconverted(schema, schema.root, body), "")
    if wrong and not schema.structural:
        kind = _kind(resource)
        raise unexpected(
            f"failed to convert new object ({_title(resource, body)}) to proper version "
            f"({resource.api_version}): unable to convert unstructured object to {kind}: {wrong}"
        )


def _kind(resource: Resource) -> str:
    return f"{resource.group}/{resource.version}, Kind={resource.kind}"


def _title(resource: Resource, body: Object) -> str:
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}; {_kind(resource)}"


def _text(found: list[tuple[str, str]]) -> str:
    lines = [f"{path}: {message}" if path else message for path, message in found]
    return lines[0] if len(lines) == 1 else "\n  ".join(("errors:", *lines))


def _walk(schema: Schema, node: Node, value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Path and message of every mismatch."""
    kind = _atom(schema, node)
    if kind == "any" or value is None:
        return
    if kind == "map":
        yield from _walk_map(schema, node, value, path)
    elif kind == "list":
        yield from _walk_list(schema, node, value, path)
    elif message := _scalar(kind, value):
        yield path, message


def _atom(schema: Schema, node: Node) -> str:
    """`map`, `list`, a scalar type, `untyped` (any scalar) or `any`."""
    if node.get("x-kubernetes-int-or-string") or node.get("oneOf"):
        return "untyped"
    kinds = node.get("type") or ""
    (kind, *_) = kinds if isinstance(kinds, list) else [kinds]
    if kind == "array":
        return "list"
    if kind in _SCALARS:
        return str(kind)
    if node.get("properties") or isinstance(node.get("additionalProperties"), dict):
        return "map"
    return "any" if schema.open(node) else "map"


def _scalar(kind: str, value: Any) -> str:
    whole = isinstance(value, dict | list)
    if kind == "untyped":
        return f"expected any scalar, got &{{{_go(value)}}}" if whole else ""
    truth = isinstance(value, bool)
    if isinstance(value, _SCALARS[kind]) and truth == (kind == "boolean"):
        return ""
    if kind == "string":
        return f"expected string, got &value.valueUnstructured{{Value:{_go_syntax(value)}}}"
    if kind == "boolean":
        return f"expected boolean, got &{{{_go(value)}}}"
    return f"expected numeric (int or float), got {_go_type(value)}"


def _walk_map(schema: Schema, node: Node, value: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield path, f"expected map, got &{{{_go(value)}}}"
        return
    for name, one in value.items():
        child = schema.child(node, name)
        if child is None:
            yield f"{path}.{name}", "field not declared in schema"
        else:
            yield from _walk(schema, child, one, f"{path}.{name}")


def _walk_list(schema: Schema, node: Node, value: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, list):
        yield path, f"expected list, got &{{{_go(value)}}}"
        return
    item, seen = schema.item(node), set[str]()
    associative = node.get("x-kubernetes-list-type") in ("map", "set")
    for index, one in enumerate(value):
        step = f"[{index}]"
        if associative:
            keys = node.get("x-kubernetes-list-map-keys") or []
            if problem := _keyless(keys, one):
                yield path, f"element {index}: {problem}"
                return
            step = _step(keys, one)
            if step in seen:
                yield path, f"duplicate entries for key {step}"
            seen.add(step)
        yield from _walk(schema, item, one, path + step)


def _keyless(keys: list[str], item: Any) -> str:
    """Why an item of an associative list has no key."""
    if not keys:
        kind = {dict: "that's a map type", type(None): "that's an explicit null"}.get(type(item))
        return f"associative list without keys has an element {kind}" if kind else ""
    if item is None:
        return "associative list with keys may not have a null element"
    if not isinstance(item, dict):
        return "associative list with keys may not have non-map elements"
    if any(key in item or key in KEY_DEFAULTS for key in keys):
        return ""
    names = " ".join(json.dumps(key) for key in keys)
    return (
        f"associative list with keys has an element that omits all key fields [{names}] "
        "(and doesn't have default values for any key fields)"
    )


def _step(keys: list[str], item: Any) -> str:
    if not keys:
        return f"[={json.dumps(item)}]"
    named = {key: item.get(key, KEY_DEFAULTS.get(key)) for key in sorted(keys)}
    pairs = (f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None)
    return f"[{','.join(pairs)}]"


def _unconverted(schema: Schema, node: Node, value: Any) -> Iterator[str]:
    """Errors of scalars that match the schema but not the kind's Go type."""
    quantity = str(node.get("$ref", "")).endswith(_NAMED_QUANTITY)
    if quantity and isinstance(value, str) and not _QUANTITY.match(value):
        yield f"quantities must match the regular expression '{QUANTITY}'"
    node = schema.resolve(node)
    if isinstance(value, dict):
        properties, rest = node.get("properties", {}), node.get("additionalProperties")
        for name, one in value.items():
            child = properties.get(name, rest)
            yield from _unconverted(schema, child if isinstance(child, dict) else {}, one)
    elif isinstance(value, list):
        for one in value:
            yield from _unconverted(schema, node.get("items") or {}, one)
    elif "integer" in (node.get("type") or ()) and isinstance(value, float):
        yield "cannot restore int from float"


def _go(value: Any) -> str:
    """Format a value like Go's `%v`."""
    if isinstance(value, dict):
        return f"map[{' '.join(f'{key}:{_go(value[key])}' for key in sorted(value))}]"
    if isinstance(value, list):
        return f"[{' '.join(map(_go, value))}]"
    if value is None:
        return "<nil>"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _go_syntax(value: Any) -> str:
    """Format a value like Go's `%#v`."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(key)}:{_go_syntax(value[key])}" for key in sorted(value))
        return f"map[string]interface {{}}{{{pairs}}}"
    if isinstance(value, list):
        return f"[]interface {{}}{{{', '.join(map(_go_syntax, value))}}}"
    return json.dumps(value) if isinstance(value, str) else _go(value)


def _go_type(value: Any) -> str:
    names: dict[type, str] = {
        bool: "bool",
        dict: "map[string]interface {}",
        list: "[]interface {}",
    }
    return names.get(type(value), "string")
