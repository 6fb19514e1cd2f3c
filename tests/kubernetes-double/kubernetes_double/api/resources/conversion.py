"""Converts Events between core `v1`, in which they are stored, and `events.k8s.io/v1`."""

from __future__ import annotations

from typing import Any

from kubernetes_double.api.resources.registry import Resource

Object = dict[str, Any]

NAMES = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}
BACK = {core: new for new, core in NAMES.items()}


def to_storage(resource: Resource, obj: Object) -> Object:
    """Convert from the requested version to the stored one."""
    if resource.group != "events.k8s.io":
        return obj
    return {**{NAMES.get(name, name): value for name, value in obj.items()}, "apiVersion": "v1"}


def from_storage(resource: Resource, obj: Object) -> Object:
    """Convert from the stored version to the requested one."""
    if resource.group == "events.k8s.io":
        obj = {BACK.get(name, name): value for name, value in obj.items()}
    if obj.get("apiVersion") == resource.api_version:
        return obj
    return {**obj, "apiVersion": resource.api_version}
