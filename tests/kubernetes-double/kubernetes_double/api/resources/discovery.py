"""Discovery: versions, groups, resources."""

from __future__ import annotations

from typing import Any

from kubernetes_double.api.requests.errors import no_such_path
from kubernetes_double.api.resources import openapi
from kubernetes_double.api.resources.kinds import Kinds
from kubernetes_double.api.resources.registry import Resource

Object = dict[str, Any]
DOORS: dict[str, tuple[str, list[str]]] = {
    "status": ("", ["get", "patch", "update"]),
    "scale": ("Scale", ["get", "patch", "update"]),
    "log": ("", ["get"]),
    "eviction": ("Eviction", ["create"]),
    "binding": ("Binding", ["create"]),
    "token": ("TokenRequest", ["create"]),
    "finalize": ("", ["update"]),
}
ELSEWHERE = {
    "Scale": ("autoscaling", "v1"),
    "Eviction": ("policy", "v1"),
    "TokenRequest": ("authentication.k8s.io", "v1"),
}


def answer(kinds: Kinds, path: str, base: str) -> Object:
    """The body for a discovery path. Raises a 404."""
    parts = [part for part in path.split("/") if part]
    match parts:
        case ["version"]:
            return version(kinds.definitions.version)
        case ["api"]:
            address = base.partition("://")[2]
            by_client = [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}]
            return {
                "kind": "APIVersions",
                "versions": ["v1"],
                "serverAddressByClientCIDRs": by_client,
            }
        case ["api", "v1"]:
            return _resources(kinds, "", "v1")
        case ["apis"]:
            groups = [_group(kinds, name) for name in _groups(kinds)]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["apis", group] if group in _groups(kinds):
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(kinds, group)}
        case ["apis", group, name]:
            return _resources(kinds, group, name)
        case ["openapi", "v3", *_]:
            return openapi.answer(kinds, path)
        case _:
            raise no_such_path()


def version(text: str) -> Object:
    """The body of /version."""
    major, minor, _ = text.split(".")
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"v{text}",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": "linux/amd64",
    }


def _groups(kinds: Kinds) -> list[str]:
    return list(dict.fromkeys(r.group for r in kinds.catalog if r.group))


def _group(kinds: Kinds, name: str) -> Object:
    found = dict.fromkeys(r.version for r in kinds.catalog if r.group == name)
    versions = [{"groupVersion": f"{name}/{one}", "version": one} for one in found]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def _resources(kinds: Kinds, group: str, name: str) -> Object:
    found = [r for r in kinds.catalog if (r.group, r.version) == (group, name)]
    if not found:
        raise no_such_path()
    entries = [entry for resource in found for entry in _entries(resource)]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": found[0].api_version,
        "resources": entries,
    }


def _entries(resource: Resource) -> list[Object]:
    main: Object = {
        "name": resource.plural,
        "singularName": resource.singular or resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short:
        main["shortNames"] = list(resource.short)
    if resource.categories:
        main["categories"] = list(resource.categories)
    doors: list[Object] = []
    for door in resource.subresources:
        kind, verbs = DOORS.get(door, ("", ["get", "patch", "update"]))
        entry: Object = {
            "name": f"{resource.plural}/{door}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": kind or resource.kind,
            "verbs": verbs,
        }
        if kind in ELSEWHERE:
            entry["group"], entry["version"] = ELSEWHERE[kind]
        doors.append(entry)
    return [main, *doors]
