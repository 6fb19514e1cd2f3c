"""Helpers shared by the workload controllers: pods from templates."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets

from kubernetes_double.nodes.client import Kind, Object
from kubernetes_double.nodes.informer import owner_reference

_COST = "controller.kubernetes.io/pod-deletion-cost"


def pod_of(kind: Kind, owner: Object, template: Object, *, name: str) -> Object:
    """A new pod from its owner's template, which the caller may modify."""
    metadata = template.get("metadata", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": dict(metadata.get("labels", {})),
            "annotations": dict(metadata.get("annotations", {})),
            "ownerReferences": owner_reference(kind, owner),
        },
        "spec": copy.deepcopy(template["spec"]),
    }


def revision_of(template: Object) -> str:
    """A hash of a template."""
    text = json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def some_letters() -> str:
    """A random suffix for a pod's name."""
    return secrets.token_hex(3)[:5]


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready; never while it is being deleted."""
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not is_leaving(pod)


def is_leaving(pod: Object) -> bool:
    """Whether a pod is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


def is_over(pod: Object) -> bool:
    """Whether a pod has succeeded or failed."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def first_to_go(pods: list[Object]) -> list[Object]:
    """Pods in order of deletion: unbound, not ready, cheaper to delete and younger ones first."""
    newest = sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"], reverse=True)
    return sorted(newest, key=_worth)


def amount(value: int | str, total: int, *, up: bool) -> int:
    """A number, or a percentage of the total rounded up or down."""
    if isinstance(value, int):
        return value
    share = int(value.rstrip("%")) * total
    return -(-share // 100) if up else share // 100


def condition(kind: str, *, holds: bool, reason: str, at: str, before: Object) -> Object:
    """A condition of a workload, which keeps its time while it does not change."""
    status = "True" if holds else "False"
    old = next((c for c in before.get("conditions", []) if c["type"] == kind), None)
    time = old["lastTransitionTime"] if old and old["status"] == status else at
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": time}


def _worth(pod: Object) -> tuple[bool, bool, int]:
    cost = (pod["metadata"].get("annotations") or {}).get(_COST, "0")
    return "nodeName" in pod["spec"], is_ready(pod), int(cost)
