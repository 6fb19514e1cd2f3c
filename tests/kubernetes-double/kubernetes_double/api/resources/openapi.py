"""OpenAPI v3 documents per group and version: for `kubectl explain` and server-side validation."""

from __future__ import annotations

from typing import Any

from kubernetes_double.api.requests.errors import no_such_path
from kubernetes_double.api.resources.kinds import Kinds
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.resources.schemas import META, Node

Object = dict[str, Any]
PREFIX = "#/components/schemas/"


def answer(kinds: Kinds, path: str) -> Object:
    """`/openapi/v3`, or the document of one version below it. Raises a 404."""
    roots = {_root(resource): resource for resource in kinds.catalog}
    if path == "/openapi/v3":
        return {"paths": {r: {"serverRelativeURL": f"/openapi/v3/{r}"} for r in roots}}
    root = path.removeprefix("/openapi/v3/")
    if root not in roots:
        raise no_such_path()
    return _document(kinds, [one for one in kinds.catalog if _root(one) == root])


def _root(resource: Resource) -> str:
    return f"apis/{resource.api_version}" if resource.group else f"api/{resource.version}"


def _document(kinds: Kinds, resources: list[Resource]) -> Object:
    schemas: Object = {}
    for resource in resources:
        node = _with_kind(resource, kinds.schema(resource).root)
        _collect(kinds, _long_name(resource), node, schemas)
    paths = {path: entry for one in resources for path, entry in _paths(one).items()}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": f"v{kinds.definitions.version}"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _long_name(resource: Resource) -> str:
    group = ".".join(reversed((resource.group or "core").split(".")))
    return f"{group}.{resource.version}.{resource.kind}"


def _gvk(resource: Resource) -> Object:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _with_kind(resource: Resource, node: Node) -> Node:
    return {**node, "x-kubernetes-group-version-kind": [_gvk(resource)]}


def _collect(kinds: Kinds, name: str, node: Node, schemas: Object) -> None:
    """Collect a schema and everything it references."""
    if name in schemas:
        return
    schemas[name] = {}
    wanted: list[str] = [META]
    schemas[name] = _plain(node, wanted)
    for one in wanted:
        _collect(kinds, one, kinds.definitions.node(one), schemas)


def _plain(node: Any, wanted: list[str]) -> Any:
    """Convert to OpenAPI: its reference paths, and one type in place of `[type, null]`."""
    if isinstance(node, list):
        return [_plain(one, wanted) for one in node]
    if not isinstance(node, dict):
        return node
    plain: Node = {name: _plain(value, wanted) for name, value in node.items()}
    if isinstance(plain.get("type"), list):
        plain["type"] = next(one for one in plain["type"] if one != "null")
    if isinstance(plain.get("$ref"), str):
        name = plain["$ref"].rpartition("/")[2]
        wanted.append(name)
        return {"$ref": f"{PREFIX}{name}"}
    return plain


def _paths(resource: Resource) -> Object:
    """The path of one object, whose PATCH declares `fieldValidation`."""
    scope = "/namespaces/{namespace}" if resource.namespaced else ""
    path = f"/{_root(resource)}{scope}/{resource.plural}/{{name}}"
    names = ("dryRun", "fieldManager", "fieldValidation", "force")
    parameters = [{"name": n, "in": "query", "schema": {"type": "string"}} for n in names]
    patch = {
        "parameters": parameters,
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": _gvk(resource),
    }
    return {path: {"patch": patch}}
