"""Tables for printing: the columns of custom kinds and common built-in kinds."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.resources.schemas import Schema

Object = dict[str, Any]

BUILT_IN = {
    "pods": "Status=.status.phase Node=.spec.nodeName IP=.status.podIP",
    "services": "Type=.spec.type Cluster-IP=.spec.clusterIP",
    "deployments.apps": "Ready=.status.readyReplicas Desired=.spec.replicas "
    "Available=.status.availableReplicas",
    "statefulsets.apps": "Ready=.status.readyReplicas Desired=.spec.replicas",
    "replicasets.apps": "Ready=.status.readyReplicas Desired=.spec.replicas",
    "jobs.batch": "Completions=.spec.completions Succeeded=.status.succeeded Failed=.status.failed",
    "cronjobs.batch": "Schedule=.spec.schedule Suspend=.spec.suspend",
    "namespaces": "Status=.status.phase",
    "persistentvolumeclaims": "Status=.status.phase Volume=.spec.volumeName",
    "leases.coordination.k8s.io": "Holder=.spec.holderIdentity",
    "events": "Type=.type Reason=.reason Object=.involvedObject.name Message=.message",
}
STEP = re.compile(
    r"""\.(?P<name>(?:[^.\[\\]|\\.)+)|\[['"](?P<quoted>[^'"]+)['"]\]|"""
    r"""\[(?P<index>\d+)\]|\[\?\(@\.(?P<key>\w+)\s*==\s*['"](?P<value>[^'"]*)['"]\)\]"""
)


def as_table(resource: Resource, schema: Schema, answer: Object) -> Object:
    """A list, or one object, as `meta.k8s.io/v1` Table."""
    items: list[Object] = answer.get("items", [answer])
    columns = _columns(resource, schema)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": answer["metadata"] if "items" in answer else {},
        "columnDefinitions": [_definition(one) for one in columns],
        "rows": [_row(columns, one) for one in items],
    }


def _columns(resource: Resource, schema: Schema) -> list[Object]:
    name = {"name": "Name", "type": "string", "jsonPath": ".metadata.name", "format": "name"}
    age = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
    if resource.custom:
        return [name, *(schema.columns or [age])]
    pairs = [part.split("=") for part in BUILT_IN.get(resource.storage, "").split()]
    return [name, *({"name": n, "type": "string", "jsonPath": p} for n, p in pairs), age]


def _definition(column: Object) -> Object:
    return {
        "name": column["name"],
        "type": "string" if column["type"] == "date" else column["type"],
        "format": column.get("format", ""),
        "description": column.get("description", ""),
        "priority": column.get("priority", 0),
    }


def _row(columns: list[Object], obj: Object) -> Object:
    partial = {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": obj["metadata"],
    }
    return {"cells": [_cell(one, obj) for one in columns], "object": partial}


def _cell(column: Object, obj: Object) -> Any:
    value = at_path(obj, column["jsonPath"])
    if column["type"] == "date":
        return _since(value) if isinstance(value, str) else "<unknown>"
    if isinstance(value, dict | list):
        return json.dumps(value)
    if column["type"] == "string" and value is not None:
        return str(value)
    return value


def at_path(obj: Object, path: str) -> Any:
    """The value at a JSONPath of fields, indices and `[?(@.k=="v")]`; None if missing."""
    found: Any = obj
    for step in STEP.finditer(path):
        name = step["name"] or step["quoted"]
        if name is not None:
            found = found.get(name.replace("\\.", ".")) if isinstance(found, dict) else None
        elif not isinstance(found, list):
            return None
        elif step["index"]:
            found = found[int(step["index"])] if int(step["index"]) < len(found) else None
        else:
            key, value = step["key"], step["value"]
            found = next((one for one in found if str(one.get(key)) == value), None)
    return found


def _since(text: str) -> str:
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    seconds = int((datetime.now(UTC) - at).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
